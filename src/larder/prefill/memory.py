"""How many entries a cache may hold: the budget at rest, and a block more while a turn runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder.cache.sequence import SequenceCache


@dataclass(frozen=True)
class EntryCapacity:
    """The most entries of one cache, over the layers and kv heads that the budget is for.

    Args:
        resting: between two turns, slots for recalled pages included.
        heads: kv heads, over layers.
        block: M_block, entries per kv head that a running turn may add.
        finest: of them those at full precision, between two turns; None where all may be.
        full_precision_heads: kv heads that share these.
    """

    entries: int
    heads: int
    block: int
    full_precision: int | None = None
    full_precision_heads: int = 0

    def free_tokens(self, cache: SequenceCache) -> int:
        """Tokens that a cache may read before it holds budget + block."""
        rooms = [self.block + (self.entries - resident_entries(cache)) // max(1, self.heads)]
        if self.full_precision is not None:
            left = self.full_precision - full_precision_entries(cache)
            rooms.append(self.block + left // max(1, self.full_precision_heads))
        return max(0, min(rooms))

    def is_exceeded(self, cache: SequenceCache, more: int = 0) -> bool:
        """Whether a cache holds more than may rest, once it has read so many more tokens."""
        entries = resident_entries(cache) + self.heads * more
        return self.exceeded(
            entries, full_precision_entries(cache) + self.full_precision_heads * more
        )

    def exceeded(self, entries: int, finest: int) -> bool:
        """Whether so many entries, slots for pages included, are more than may rest."""
        return entries > self.entries or (
            self.full_precision is not None and finest > self.full_precision
        )


def resident_entries(cache: SequenceCache) -> int:
    """Managed entries of a cache and its slots for recalled pages."""
    return cache.managed_entries + recall_slot_entries(cache)


def recall_slot_entries(cache: SequenceCache) -> int:
    """Entries that a cache has slots for, over all layers and heads, once any are parked."""
    recalling = [tier for tier in cache.tiers if tier.has_offloaded]
    recalls = [(tier.parking.recall, tier.layer) for tier in recalling]
    return sum(recall.sets(layer) * (recall.tokens or 0) for recall, layer in recalls)


def full_precision_entries(cache: SequenceCache) -> int:
    """Managed entries of a cache at full precision."""
    lengths = cache.full_precision_lengths()
    return sum(sum(lengths[layer.index]) for layer in cache.spec.managed)


class PeakMemoryMeter:
    """Peaks of bytes and of managed entries, over all caches that live at the same time.

    Bytes are those of every tensor that a cache owns, of storage that is just being replaced, and
    of the keys and values that a scratch pass reads behind the caches.

    `peak_live_bytes` is that of the fast tiers of the caches being read alone.

    Args:
        parked_bytes: bytes of other caches that stay in memory meanwhile.
    """

    def __init__(self, parked_bytes: int = 0) -> None:
        self.parked_bytes = parked_bytes
        self.peak_bytes = 0
        self.peak_live_bytes = 0
        self.peak_entries = 0

    def add_finished(self, cache: SequenceCache) -> None:
        """Count a finished cache from now on as held elsewhere."""
        self.parked_bytes += cache.nbytes

    def observe(self, caches: Sequence[SequenceCache], passing_bytes: int) -> None:
        """Look at the caches right after a change.

        Args:
            passing_bytes: held beside them at the height of that change.
        """
        held = self.parked_bytes + sum(cache.nbytes for cache in caches)
        entries = sum(cache.managed_entries for cache in caches)
        self.peak_bytes = max(self.peak_bytes, held + passing_bytes)
        live = sum(cache.device_nbytes for cache in caches)
        self.peak_live_bytes = max(self.peak_live_bytes, live + passing_bytes)
        self.peak_entries = max(self.peak_entries, entries)
