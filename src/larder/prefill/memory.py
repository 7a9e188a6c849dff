"""How many entries a cache may hold: the budget at rest, and a block more while a turn runs."""

from __future__ import annotations

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
        finest_heads: kv heads that share these.
    """

    resting: int
    heads: int
    block: int
    finest: int | None = None
    finest_heads: int = 0

    def room(self, cache: SequenceCache) -> int:
        """Tokens that a cache may read before it holds budget + block."""
        rooms = [self.block + (self.resting - resident_entries(cache)) // max(1, self.heads)]
        if self.finest is not None:
            left = self.finest - full_precision_entries(cache)
            rooms.append(self.block + left // max(1, self.finest_heads))
        return max(0, min(rooms))

    def is_over(self, cache: SequenceCache, more: int = 0) -> bool:
        """Whether a cache holds more than may rest, once it has read so many more tokens."""
        entries = resident_entries(cache) + self.heads * more
        return self.exceeded(entries, full_precision_entries(cache) + self.finest_heads * more)

    def exceeded(self, entries: int, finest: int) -> bool:
        """Whether so many entries, slots for pages included, are more than may rest."""
        return entries > self.resting or (self.finest is not None and finest > self.finest)


def resident_entries(cache: SequenceCache) -> int:
    """Managed entries of a cache and its slots for recalled pages."""
    return cache.managed_entries + recall_slot_entries(cache)


def recall_slot_entries(cache: SequenceCache) -> int:
    """Entries that a cache has slots for, over all layers and heads, once any are parked."""
    recalling = [tier for tier in cache.tiers if tier.recalls]
    recalls = [(tier.parking.recall, tier.layer) for tier in recalling]
    return sum(recall.sets(layer) * (recall.tokens or 0) for recall, layer in recalls)


def full_precision_entries(cache: SequenceCache) -> int:
    """Managed entries of a cache at full precision."""
    lengths = cache.finest_lengths()
    return sum(sum(lengths[layer.index]) for layer in cache.spec.managed)
