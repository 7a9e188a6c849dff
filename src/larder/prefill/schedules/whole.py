"""Read everything first, then decide: the schedule of SnapKV, KVzip and most published methods.

The whole cache stands in memory before anything is dropped, so the budget binds only afterwards;
the peak is counted and shown. Reading goes by large pieces without any plan in between, which is
exact. No paper of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from larder.core.observation import Need
from larder.prefill.base import Schedule, Steps
from larder.prefill.reader import PrefillReader, PrefillSequence

# Bounds activations; without a plan in between, pieces of any size leave the same cache. The last
# piece is longer where a scorer judges by more tokens than this, and all where a part asks for it.
PIECE_TOKENS = 1024


@dataclass(frozen=True)
class Whole(Schedule):
    """One plan, when all has been read."""

    tokens: ClassVar[None] = None

    def steps(
        self, reader: PrefillReader, lanes: Sequence[PrefillSequence], ids: tuple[int, ...]
    ) -> Steps[None]:
        total = len(ids) * len(lanes)
        for number, lane in enumerate(lanes):
            yield from self._lane(reader, lane, ids)
            reader.finish(lane)
            yield len(ids) * (number + 1), total

    def _lane(
        self, reader: PrefillReader, lane: PrefillSequence, ids: tuple[int, ...]
    ) -> Steps[None]:
        start = lane.cache.next_position
        scorer = reader.planner.scorer
        voters = max(PIECE_TOKENS, scorer.protected_tokens().last)  # they stay themselves
        last = 0 if Need.TEXT in reader.planner.needs else max(0, len(ids) - voters)
        lane.cache.allocate(len(ids))
        for cut in range(0, last, PIECE_TOKENS):
            reader.append((lane,), ids[cut : min(cut + PIECE_TOKENS, last)])
            yield None
        yield from reader.read_and_evict_steps((lane,), ids[last:], ids, start)


Part = Whole
