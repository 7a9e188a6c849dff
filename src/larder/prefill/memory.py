"""Entry capacity of a cache, at rest and during a turn, and measurement of peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder.cache.sequence import SequenceCache


@dataclass(frozen=True)
class EntryCapacity:
    """Capacity of one cache, in entries over all managed layers and kv heads.

    Args:
        entries: most entries between two turns, recall slots included.
        heads: kv heads of all managed layers.
        block: M_block, entries per kv head that a running turn may add.
        full_precision: most entries at full precision between two turns; None for no limit.
        full_precision_heads: kv heads that share them.
    """

    entries: int
    heads: int
    block: int
    full_precision: int | None = None
    full_precision_heads: int = 0

    def free_tokens(self, cache: SequenceCache) -> int:
        """Tokens that a cache may read until it holds budget + block."""
        free = [self.block + (self.entries - resident_entries(cache)) // max(1, self.heads)]
        if self.full_precision is not None:
            left = self.full_precision - full_precision_entries(cache)
            free.append(self.block + left // max(1, self.full_precision_heads))
        return max(0, min(free))

    def is_exceeded(self, cache: SequenceCache, more: int = 0) -> bool:
        """True if a cache exceeds its capacity at rest once it has read `more` tokens."""
        entries = resident_entries(cache) + self.heads * more
        return self.exceeded(
            entries, full_precision_entries(cache) + self.full_precision_heads * more
        )

    def exceeded(self, entries: int, finest: int) -> bool:
        """True if numbers of entries, recall slots included, exceed the capacity at rest."""
        return entries > self.entries or (
            self.full_precision is not None and finest > self.full_precision
        )


def resident_entries(cache: SequenceCache) -> int:
    """Managed entries of a cache plus its recall slots."""
    return cache.managed_entries + recall_slot_entries(cache)


def recall_slot_entries(cache: SequenceCache) -> int:
    """Recall slots of a cache in entries, over all layers and heads; 0 before any offload."""
    recalling = [tier for tier in cache.tiers if tier.has_offloaded]
    recalls = [(tier.parking.recall, tier.layer) for tier in recalling]
    return sum(recall.sets(layer) * (recall.tokens or 0) for recall, layer in recalls)


def full_precision_entries(cache: SequenceCache) -> int:
    """Managed entries of a cache at full precision."""
    lengths = cache.full_precision_lengths()
    return sum(sum(lengths[layer.index]) for layer in cache.spec.managed)


class PeakMemoryMeter:
    """Peak bytes and peak managed entries over all caches that exist at the same time.

    Bytes count every tensor that a cache owns, storage that is being replaced, and keys and values
    of scratch passes. `peak_live_bytes` counts the fast tiers of the caches being read only.

    Args:
        parked_bytes: bytes of other caches that stay in memory.
    """

    def __init__(self, parked_bytes: int = 0) -> None:
        self.parked_bytes = parked_bytes
        self.peak_bytes = 0
        self.peak_live_bytes = 0
        self.peak_entries = 0

    def add_finished(self, cache: SequenceCache) -> None:
        """Count a finished cache among the other caches from now on."""
        self.parked_bytes += cache.nbytes

    def observe(self, caches: Sequence[SequenceCache], passing_bytes: int) -> None:
        """Measure the caches right after a change.

        Args:
            passing_bytes: temporary bytes beside them at the peak of that change.
        """
        total = self.parked_bytes + sum(cache.nbytes for cache in caches)
        entries = sum(cache.managed_entries for cache in caches)
        self.peak_bytes = max(self.peak_bytes, total + passing_bytes)
        live = sum(cache.device_nbytes for cache in caches)
        self.peak_live_bytes = max(self.peak_live_bytes, live + passing_bytes)
        self.peak_entries = max(self.peak_entries, entries)
