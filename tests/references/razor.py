"""`razor`: everything that a head rejects ends up in one of its kept entries."""

from __future__ import annotations

from typing import Any

from larder.core import Entries, LayerScores
from references.counted import count_of, merge, protected_of, scores_of
from references.outcome import Outcome, untouched


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
    del part
    outcome = untouched(entries, kept)
    for head, own in enumerate(kept):
        gone = [s for s in range(entries.lengths[head]) if s not in own]
        slot = slot_of(entries, scored, head, own)
        if gone and slot is not None:
            merge(outcome, entries, head, {slot: gone})
    return outcome


def slot_of(entries: Entries, scored: LayerScores, head: int, kept: list[int]) -> int | None:
    several = [j for j in kept if count_of(entries, head, j) > 1]
    if several:
        return max(several, key=lambda j: (count_of(entries, head, j), -j))
    spared, scores = protected_of(entries, scored, head), scores_of(entries, scored, head)
    free = [j for j in kept if not spared[j]]
    return min(free, key=lambda j: (scores[j], j)) if free else None
