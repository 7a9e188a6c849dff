"""Prefix sharing: caches of texts that begin alike hold one storage of the beginning.

    source   [ prefix ][ its own entries | slack ]
    fork     [ prefix ][ its own entries | slack ]

The storage of the source, and of all that hold it, is divided at the end of the prefix. So each
storage has entries that all of its holders read: what one of them frees is exactly what it alone
held. As in a radix tree of blocks (SGLang: Zheng et al., arXiv:2312.07104, section 3), whose edges
have any length here.
"""

from __future__ import annotations

from collections.abc import Iterable

from larder.cache.sequence import SequenceCache


def fork_prefix(cache: SequenceCache, length: int) -> SequenceCache:
    """Fork of the first `length` tokens of a cache, which holds no storage of later ones.

    What the form does not divide is copied. Neither of both copies entries to append others.
    """
    divide(cache, length)
    copy = cache.fork()
    if length < copy.next_position:
        copy.truncate(length)
    copy.compact()
    for store, source in zip(copy.layers, cache.layers, strict=True):
        if store.shared_storages():
            store.seal()
            source.seal()
        else:
            store.separate()
    return copy


def divide(cache: SequenceCache, length: int) -> None:
    """Divide storage at true position `length`, in all forks of a cache, where forms allow it.

    `truncate(length)` then frees what the cache alone holds behind it.
    """
    for store in cache.layers:
        store.divide(length)


def seal(cache: SequenceCache) -> None:
    """Keep storage that forks hold too as it is: tokens that come are stored apart."""
    for store in cache.layers:
        store.seal()


def prefix_nbytes(cache: SequenceCache, length: int) -> int:
    """Bytes that `fork_prefix` shares with a cache."""
    return sum(store.prefix_nbytes(length) for store in cache.layers)


def shared_storages(cache: SequenceCache) -> dict[object, int]:
    """Bytes of each divided storage that forks of a cache hold too, by what identifies it."""
    return {key: n for store in cache.layers for key, n in store.shared_storages().items()}


def unique_nbytes(caches: Iterable[SequenceCache]) -> int:
    """Bytes of several caches, with storage that they share counted once."""
    held: dict[object, int] = {}
    others = 0
    for cache in caches:
        for lease in cache.page_leases():
            held |= {(id(lease.pool), page): lease.page_bytes for page in lease.pages}
        others += cache.fixed_nbytes
        for tensor in (tensor for each in cache.layers for tensor in each.tensors()):
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return others + sum(held.values())
