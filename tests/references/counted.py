"""Means over entries that stand for several tokens each, for the loops of compensations."""

from __future__ import annotations

import math

from larder.core import LOG_COUNT, Entries, LayerScores
from references.outcome import Outcome, key_of, value_of

Joined = dict[int, list[int]]  # what is folded into each kept entry of a head


def count_of(entries: Entries, head: int, entry: int) -> float:
    """Number of tokens that an entry represents."""
    return math.exp(float(entries.columns[LOG_COUNT][entries.starts[head] + entry]))


def protected_of(entries: Entries, scored: LayerScores, head: int) -> list[bool]:
    first = sum(entries.lengths[:head])
    return [bool(scored.protected[first + s]) for s in range(entries.lengths[head])]


def scores_of(entries: Entries, scored: LayerScores, head: int) -> list[float]:
    first = sum(entries.lengths[:head])
    return [float(scored.scores[first + s]) for s in range(entries.lengths[head])]


def merge(
    outcome: Outcome, entries: Entries, head: int, joined: Joined, counted: bool = True
) -> None:
    """Every kept entry becomes the mean of itself and what joined it."""
    for entry in outcome.heads[head]:
        if entry.kept not in joined:
            continue
        members = [entry.kept, *joined[entry.kept]]
        counts = [count_of(entries, head, s) if counted else 1.0 for s in members]
        entry.key = mean([key_of(entries, head, s) for s in members], counts)
        entry.value = mean([value_of(entries, head, s) for s in members], counts)
        if counted:
            entry.columns[LOG_COUNT] = math.log(sum(counts))


def mean(rows: list[list[float]], weights: list[float]) -> list[float]:
    """The weighted mean of rows."""
    total = sum(weights)
    pairs = list(zip(rows, weights, strict=True))
    return [sum(w * row[d] for row, w in pairs) / total for d in range(len(rows[0]))]
