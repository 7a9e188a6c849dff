"""Where the caches of one conversation live: one active on the device, the others parked.

A parked cache is in host memory without slack. A switch writes the active one back first, with all
that was appended to it; interrupted halfway, no cache is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.cache.state_dict import is_slow_tier_tensor, layer_of
from larder.core.spec import ModelSpec
from larder.prefill.memory import full_precision_entries, recall_slot_entries


@dataclass(frozen=True)
class OffloadedCache:
    """A cache at rest in host memory."""

    state: Mapping[str, Tensor]
    meta: Mapping[str, str]
    entries: int
    next_position: int
    finest: int
    fast_tier_bytes: int
    paged: int
    layers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.state.values())

    def restore(self, spec: ModelSpec) -> SequenceCache:
        """The cache on the device again; nobody may use this any more."""
        return SequenceCache.adopt(spec, self.state, self.meta)

    def shown(self, spec: ModelSpec) -> SequenceCache:
        """It as it is, where it is: only to be looked at, for both have the same tensors."""
        resting = replace(spec, device=torch.device("cpu"))
        return SequenceCache.adopt(resting, dict(self.state), self.meta)

    def copied(self, spec: ModelSpec) -> SequenceCache:
        """A second cache on the device, with tensors of its own."""
        return SequenceCache.restore(spec, self.state, self.meta)


@dataclass(frozen=True)
class CacheUsage:
    """What one cache holds, wherever it is.

    Args:
        entries: managed entries over all layers and heads.
        nbytes: bytes of every tensor.
        next_position: tokens it has truly read.
        finest: those of the entries that are held at full precision.
        fast_tier_bytes: bytes in the model's memory when it answers: all, or those of the fast tier
            and of the pages that a step fetches.
        paged: entries that there are slots for, over all layers and heads, once any are parked.
        layers: bytes of `fast_tier_bytes` by layer.
    """

    entries: int
    nbytes: int
    next_position: int
    finest: int
    fast_tier_bytes: int
    paged: int
    layers: tuple[int, ...]


class SessionCaches:
    """The caches of a conversation, by number. Not safe for two threads at once.

    A cache that is given to a shelf is taken over: its tensors move, and it is empty afterwards.
    """

    def __init__(self, spec: ModelSpec, caches: Iterable[SequenceCache]) -> None:
        self._spec = spec
        self._parked: dict[int, OffloadedCache] = {}
        self._active: tuple[int, SequenceCache] | None = None
        self._lent: dict[int, OffloadedCache] = {}
        for cache in caches:
            self.add(cache)

    def __len__(self) -> int:
        return len(self.holdings())

    def add(self, cache: SequenceCache) -> None:
        """Park one more cache under the next number."""
        self._parked[len(self)] = offload(cache)

    def activate(self, number: int) -> SequenceCache:
        """The cache of that number, on the device; the one that was active is written back."""
        if self._active is not None and self._active[0] == number:
            return self._active[1]
        self.rest()
        parked = self._parked[number]
        is_lent = self._lent.get(number) is parked
        restored = (parked.copied if is_lent else parked.restore)(self._spec)
        self._active = (number, restored)
        del self._parked[number]
        return restored

    def copies(self) -> Iterator[SequenceCache]:
        """Each cache by number, on tensors of its own in host memory; none of them moves."""
        spec = replace(self._spec, device=torch.device("cpu"))
        for number in range(len(self)):
            if self._active is not None and self._active[0] == number:
                cache = self._active[1]
                yield SequenceCache.restore(spec, cache.state(), cache.meta())
            else:
                parked = self._parked[number]
                yield SequenceCache.restore(spec, parked.state, parked.meta)

    def lend_views(self) -> tuple[SequenceCache, ...]:
        """Each cache by number, to be looked at by another thread until it is `returned`.

        Those at rest are not copied, unless they are wanted meanwhile; the active one is.
        """
        resting = replace(self._spec, device=torch.device("cpu"))
        caches = {number: parked.shown(self._spec) for number, parked in self._parked.items()}
        self._lent = dict(self._parked)
        if self._active is not None:
            number, cache = self._active
            caches[number] = SequenceCache.restore(resting, cache.state(), cache.meta())
        return tuple(caches[number] for number in sorted(caches))

    def end_lending(self) -> None:
        """Nobody looks at its caches any more."""
        self._lent = {}

    def rest(self) -> None:
        """Write the active cache back, so that the device is free."""
        if self._active is None:
            return
        number, cache = self._active
        self._parked[number] = offload(cache)
        self._active = None

    def with_cache(self, number: int, cache: SequenceCache) -> SessionCaches:
        """A shelf with this cache under that number, new and parked, or in the place of another.

        In the place of the active one it is active, and nothing of it is copied. All other caches
        are shared with this shelf: go on with one of the two.
        """
        shelf = SessionCaches(self._spec, ())
        shelf._lent = self._lent
        if self._active is not None and self._active[0] == number:
            shelf._parked, shelf._active = dict(self._parked), (number, cache)
            return shelf
        shelf._parked = {**self._parked, number: offload(cache)}
        shelf._active = self._active
        return shelf

    def replace_active(self, cache: SequenceCache) -> None:
        """Have another cache be the active one, in place of the one that is lost for it."""
        assert self._active is not None
        self._active = (self._active[0], cache)

    @property
    def active(self) -> int | None:
        """The number of the active cache."""
        return None if self._active is None else self._active[0]

    @property
    def active_cache(self) -> SequenceCache | None:
        """The active cache."""
        return None if self._active is None else self._active[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, active and parked."""
        return self.parked_bytes + (0 if self._active is None else self._active[1].nbytes)

    @property
    def fast_tier_bytes(self) -> int:
        """Bytes of the active cache in the model's memory, as `Holding.in_use`; 0 without one."""
        return 0 if self._active is None else _fast_tier_bytes(self._active[1])

    @property
    def parked_bytes(self) -> int:
        """Bytes of the parked caches alone."""
        return sum(
            parked.nbytes for number, parked in self._parked.items() if number != self.active
        )

    def holdings(self) -> tuple[CacheUsage, ...]:
        """What each cache holds, by number."""
        held = {
            number: CacheUsage(
                parked.entries,
                parked.nbytes,
                parked.next_position,
                parked.finest,
                parked.fast_tier_bytes,
                parked.paged,
                parked.layers,
            )
            for number, parked in self._parked.items()
        }
        if self._active is not None:
            number, cache = self._active
            told = (
                cache.managed_entries,
                cache.nbytes,
                cache.next_position,
                full_precision_entries(cache),
            )
            layers = tuple(_fast_tier_bytes_by_layer(cache))
            held[number] = CacheUsage(
                *told, _fast_tier_bytes(cache), recall_slot_entries(cache), layers
            )
        return tuple(held[number] for number in sorted(held))


def offload(cache: SequenceCache) -> OffloadedCache:
    """Take a cache over into host memory; it is empty afterwards."""
    held = cache.managed_entries, cache.next_position, full_precision_entries(cache)
    slots, paged, meta = _slot_bytes(cache), recall_slot_entries(cache), cache.meta()
    state = cache.release_state(torch.device("cpu"))
    layers, fast = slots, sum(slots)
    for name, tensor in state.items():
        if is_slow_tier_tensor(name):
            continue
        nbytes = tensor.untyped_storage().nbytes()
        fast += nbytes
        if (layer := layer_of(name)) is not None:
            layers[layer] += nbytes
    return OffloadedCache(state, meta, *held, fast, paged, tuple(layers))


def _fast_tier_bytes(cache: SequenceCache) -> int:
    """Bytes in the model's memory, slots for pages included even if none was fetched yet."""
    return cache.device_nbytes + sum(tier.foreseen_bytes for tier in cache.tiers)


def _fast_tier_bytes_by_layer(cache: SequenceCache) -> list[int]:
    """The same by layer."""
    layers = [store.device_nbytes for store in cache.stores]
    for tier in cache.tiers:
        layers[tier.layer.index] += tier.foreseen_bytes
    return layers


def _slot_bytes(cache: SequenceCache) -> list[int]:
    """Bytes of the slots for pages, there or not yet, by layer."""
    layers = [0] * len(cache.stores)
    for tier in cache.tiers:
        there = sum(slot.untyped_storage().nbytes() for slot in tier.finder.slots())
        layers[tier.layer.index] = there + tier.foreseen_bytes
    return layers
