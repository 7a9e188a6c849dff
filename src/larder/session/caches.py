"""Caches of one conversation: one active on the device, the others offloaded to host memory.

An offloaded cache has no slack. A switch first writes the active cache back, with everything that
was appended to it; if it is interrupted, no cache is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from larder.cache.memory_usage import storage_bytes
from larder.cache.sequence import SequenceCache
from larder.cache.state_dict import layer_of
from larder.core.spec import ModelSpec
from larder.prefill.memory import full_precision_entries, recall_slot_entries


@dataclass(frozen=True)
class CacheUsage:
    """Entries and bytes of one cache, on the device or offloaded.

    Args:
        entries: managed entries over all layers and heads.
        nbytes: bytes of all tensors.
        next_position: number of tokens read.
        full_precision_entries: entries at full precision.
        fast_tier_bytes: bytes in device memory when the cache answers: all, or those of the fast
            tier and of the page slots.
        slot_entries: capacity of the page slots, over all layers and heads, once entries are
            offloaded.
        layers: bytes of `fast_tier_bytes` by layer.
    """

    entries: int
    nbytes: int
    next_position: int
    full_precision_entries: int
    fast_tier_bytes: int
    slot_entries: int
    layers: tuple[int, ...]

    @staticmethod
    def of(cache: SequenceCache) -> CacheUsage:
        """Usage of a cache on the device."""
        return CacheUsage(
            entries=cache.managed_entries,
            nbytes=cache.nbytes,
            next_position=cache.next_position,
            full_precision_entries=full_precision_entries(cache),
            fast_tier_bytes=_fast_tier_bytes(cache),
            slot_entries=recall_slot_entries(cache),
            layers=tuple(_fast_tier_bytes_by_layer(cache)),
        )


@dataclass(frozen=True)
class OffloadedCache:
    """Cache offloaded to host memory, with its usage at that time."""

    state: Mapping[str, Tensor]
    meta: Mapping[str, str]
    usage: CacheUsage

    def restore(self, spec: ModelSpec) -> SequenceCache:
        """Move the cache to the device; this object is invalid afterwards."""
        return SequenceCache.adopt(spec, self.state, self.meta)

    def host_view(self, spec: ModelSpec) -> SequenceCache:
        """Read-only view in host memory that shares the tensors."""
        return SequenceCache.adopt(spec.on_host, dict(self.state), self.meta)

    def copied(self, spec: ModelSpec) -> SequenceCache:
        """Copy of the cache on the device, with tensors of its own."""
        return SequenceCache.restore(spec, self.state, self.meta)


class SessionCaches:
    """Caches of a conversation, by number. Not thread-safe.

    It takes ownership of an added cache: the tensors move, and the added object is empty
    afterwards.
    """

    def __init__(self, spec: ModelSpec, caches: Iterable[SequenceCache]) -> None:
        self._spec = spec
        self._offloaded: dict[int, OffloadedCache] = {}
        self._active: tuple[int, SequenceCache] | None = None
        self._lent_caches: dict[int, OffloadedCache] = {}
        for cache in caches:
            self.add(cache)

    @staticmethod
    def of_active(spec: ModelSpec, cache: SequenceCache) -> SessionCaches:
        """Caches of a conversation that has this one only, which is active."""
        caches = SessionCaches(spec, ())
        caches._active = (0, cache)
        return caches

    def __len__(self) -> int:
        return len(self.usage())

    def add(self, cache: SequenceCache) -> None:
        """Offload one more cache under the next number."""
        self._offloaded[len(self)] = offload(cache)

    def activate(self, number: int) -> SequenceCache:
        """Move a cache to the device and return it; the active one is written back first."""
        if self._active is not None and self._active[0] == number:
            return self._active[1]
        self.offload_active()
        offloaded = self._offloaded[number]
        is_lent = self._lent_caches.get(number) is offloaded
        restored = (offloaded.copied if is_lent else offloaded.restore)(self._spec)
        self._active = (number, restored)
        del self._offloaded[number]
        return restored

    def fork(self, number: int) -> SequenceCache:
        """Copy a cache to the device; the original stays where it is."""
        if self._active is not None and self._active[0] == number:
            return self._active[1].fork()
        return self._offloaded[number].copied(self._spec)

    def view(self, number: int) -> SequenceCache:
        """A cache for reading, on the tier that it is on."""
        if self._active is not None and self._active[0] == number:
            return self._active[1]
        return self._offloaded[number].host_view(self._spec)

    def copies(self) -> Iterator[SequenceCache]:
        """Copy every cache by number into host memory; the originals stay where they are."""
        spec = self._spec.on_host
        for index in range(len(self)):
            if self._active is not None and self._active[0] == index:
                cache = self._active[1]
                yield SequenceCache.restore(spec, cache.state(), cache.meta())
            else:
                offloaded = self._offloaded[index]
                yield SequenceCache.restore(spec, offloaded.state, offloaded.meta)

    def lend_views(self) -> tuple[SequenceCache, ...]:
        """Views of all caches by number, for another thread to read until `end_lending`.

        The active cache is copied. Offloaded ones share their tensors, and are copied only if they
        are activated meanwhile.
        """
        host_spec = self._spec.on_host
        caches = {number: each.host_view(self._spec) for number, each in self._offloaded.items()}
        self._lent_caches = dict(self._offloaded)
        if self._active is not None:
            number, cache = self._active
            caches[number] = SequenceCache.restore(host_spec, cache.state(), cache.meta())
        return tuple(caches[number] for number in sorted(caches))

    def end_lending(self) -> None:
        """End the lending of `lend_views`: the views are no longer read."""
        self._lent_caches = {}

    def offload_active(self) -> None:
        """Offload the active cache, so that the device is free."""
        if self._active is None:
            return
        number, cache = self._active
        self._offloaded[number] = offload(cache)
        self._active = None

    def with_cache(self, number: int, cache: SequenceCache) -> SessionCaches:
        """Caches with one added or replaced; a new one is offloaded.

        A cache that replaces the active one becomes active without a copy. All other caches are
        shared with this object: use only one of the two afterwards.
        """
        caches = SessionCaches(self._spec, ())
        caches._lent_caches = self._lent_caches
        if self._active is not None and self._active[0] == number:
            caches._offloaded, caches._active = dict(self._offloaded), (number, cache)
            return caches
        caches._offloaded = {**self._offloaded, number: offload(cache)}
        caches._active = self._active
        return caches

    def replace_active(self, cache: SequenceCache) -> None:
        """Replace the active cache by another one; the former is dropped."""
        assert self._active is not None
        self._active = (self._active[0], cache)

    @property
    def active_number(self) -> int | None:
        """Number of the active cache."""
        return None if self._active is None else self._active[0]

    @property
    def active_cache(self) -> SequenceCache | None:
        """Active cache; None if all are offloaded."""
        return None if self._active is None else self._active[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, active and offloaded."""
        return self.offloaded_bytes + (0 if self._active is None else self._active[1].nbytes)

    @property
    def fast_tier_bytes(self) -> int:
        """Bytes of the active cache in device memory, page slots included; 0 without one."""
        return 0 if self._active is None else _fast_tier_bytes(self._active[1])

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the offloaded caches."""
        return sum(
            each.usage.nbytes
            for number, each in self._offloaded.items()
            if number != self.active_number
        )

    def usage(self) -> tuple[CacheUsage, ...]:
        """Entries and bytes of each cache, by number."""
        usage = {number: each.usage for number, each in self._offloaded.items()}
        if self._active is not None:
            number, cache = self._active
            usage[number] = CacheUsage.of(cache)
        return tuple(usage[number] for number in sorted(usage))


def offload(cache: SequenceCache) -> OffloadedCache:
    """Move a cache to host memory; the given object is empty afterwards."""
    usage, layers, meta = CacheUsage.of(cache), _slot_bytes(cache), cache.meta()
    state = cache.release_state(torch.device("cpu"))
    fast = sum(layers)
    for name, tensor in state.items():
        layer = layer_of(name)
        if layer is not None and cache.layers[layer].is_slow_state(name.partition(".")[2]):
            continue
        nbytes = tensor.untyped_storage().nbytes()
        fast += nbytes
        if layer is not None:
            layers[layer] += nbytes
    held = storage_bytes(state.values())
    usage = replace(usage, nbytes=held, fast_tier_bytes=fast, layers=tuple(layers))
    return OffloadedCache(state, meta, usage)


def _fast_tier_bytes(cache: SequenceCache) -> int:
    """Bytes in device memory, with the page slots even before the first recall."""
    return cache.device_nbytes + sum(tier.foreseen_bytes for tier in cache.tiers)


def _fast_tier_bytes_by_layer(cache: SequenceCache) -> list[int]:
    """Bytes in device memory by layer, page slots included."""
    layers = [store.device_nbytes for store in cache.layers]
    for tier in cache.tiers:
        layers[tier.layer.index] += tier.foreseen_bytes
    return layers


def _slot_bytes(cache: SequenceCache) -> list[int]:
    """Bytes of the page slots by layer, allocated or not yet."""
    layers = [0] * len(cache.layers)
    for tier in cache.tiers:
        layers[tier.layer.index] = tier.fetcher.slot_bytes + tier.foreseen_bytes
    return layers
