"""Bytes of several caches that may share storage."""

from __future__ import annotations

from collections.abc import Iterable

from larder.cache.sequence import SequenceCache


def held_nbytes(caches: Iterable[SequenceCache]) -> int:
    """Bytes of several caches, with storage that they share counted once."""
    held: dict[object, int] = {}
    others = 0
    for cache in caches:
        for lease in cache.page_leases():
            held |= {(id(lease.pool), page): lease.pool.page_bytes for page in lease.pages}
        others += cache.fixed_nbytes
        for tensor in (tensor for each in cache.layers for tensor in each.tensors()):
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return others + sum(held.values())
