"""`kvmerger`: every run of similar keys becomes one entry, and runs grow until they fit."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Entries, LayerScores
from references.counted import mean, protected_of, scores_of
from references.ops.nearest import cosine
from references.outcome import Outcome, key_of, untouched, value_of

SMALL = {"threshold": -0.1, "width": 0.8}  # parameters for small layers


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
    lengths = entries.lengths
    if all(len(own) == held for own, held in zip(kept, lengths, strict=True)):
        return untouched(entries, kept)
    chosen = [sets(part, entries, scored, head, len(own)) for head, own in enumerate(kept)]
    outcome = untouched(entries, [[pivot for pivot, _ in head] for head in chosen])
    for head, runs in enumerate(chosen):
        for entry, (pivot, gone) in zip(outcome.heads[head], runs, strict=True):
            if not gone:
                continue
            apart = [distance(entries, head, pivot, s) for s in gone]
            sigma = part.width * sum(apart) / (math.sqrt(2) * (len(gone) + 1))
            kernel = [math.exp(-((d / sigma) ** 2) / 2) if d else 1.0 for d in apart]
            members, weights = [pivot, *gone], [1.0, *kernel]
            entry.key = mean([key_of(entries, head, s) for s in members], weights)
            entry.value = mean([value_of(entries, head, s) for s in members], weights)
    return outcome


def sets(
    part: Any, entries: Entries, scored: LayerScores, head: int, most: int
) -> list[tuple[int, list[int]]]:
    """Pivots and what joins them, in order; the best of them where there is room for fewer."""
    shields, scores = protected_of(entries, scored, head), scores_of(entries, scored, head)
    ranks = [math.inf if shield else score for shield, score in zip(shields, scores, strict=True)]
    joins = likeness(entries, shields, head)
    steps = sorted({part.threshold, *(alike for alike in joins.values() if alike < part.threshold)})
    found = runs(entries.lengths[head], joins, part.threshold)
    while len(found) > most and steps:
        found = runs(entries.lengths[head], joins, steps.pop())
    pivots = [max(run, key=lambda s: (ranks[s], -s)) for run in found]
    best = sorted(range(len(found)), key=lambda n: (-ranks[pivots[n]], n))[:most]
    return [(pivots[n], [s for s in found[n] if s != pivots[n]]) for n in sorted(best)]


def likeness(entries: Entries, shields: list[bool], head: int) -> dict[int, float]:
    """The cosine of an entry with the one before, where both may be merged."""
    return {
        s: cosine(key_of(entries, head, s - 1), key_of(entries, head, s))
        for s in range(1, entries.lengths[head])
        if not shields[s] and not shields[s - 1]
    }


def runs(count: int, joins: dict[int, float], threshold: float) -> list[list[int]]:
    found: list[list[int]] = []
    for s in range(count):
        if s in joins and joins[s] >= threshold:
            found[-1].append(s)
        else:
            found.append([s])
    return found


def distance(entries: Entries, head: int, one: int, other: int) -> float:
    return math.dist(key_of(entries, head, one), key_of(entries, head, other))
