"""`fold_ema`: D2O's merging, one rejected entry at a time."""

from __future__ import annotations

import math
from typing import Any

from larder.core.observation import Entries, Scored
from references.ops.nearest import cosine
from references.outcome import Outcome, key_of, untouched, value_of

Best = tuple[float, int]  # likeness, and the kept entry of the head that is nearest


def settle(part: Any, entries: Entries, scored: Scored, kept: list[list[int]]) -> Outcome:
    outcome = untouched(entries, kept)
    gone = [[s for s in range(n) if s not in kept[h]] for h, n in enumerate(entries.lengths)]
    if not any(gone):
        return outcome
    best = [
        {s: nearest(part, entries, h, s, kept[h]) for s in head if kept[h]}
        for h, head in enumerate(gone)
    ]
    before = [float(tau) for tau in entries.scalars["tau"]]
    judged, means = by_rank(best) if part.variant.value == "code" else by_head(best)
    taus = [moved(part.beta, old, mean) for old, mean in zip(before, means, strict=True)]
    outcome.scalars["tau"] = taus
    for head, found in enumerate(best):
        folded: dict[int, list[tuple[float, int]]] = {}
        for s, (u, j) in found.items():
            if part.threshold.value == "none" or judged[head][s] >= taus[head] - 1e-5:
                folded.setdefault(j, []).append((u, s))
        for entry in outcome.heads[head]:
            if entry.kept in folded:
                into = folded[entry.kept]
                entry.key = merged(part, into, entry.kept, lambda s, h=head: key_of(entries, h, s))
                entry.value = merged(
                    part, into, entry.kept, lambda s, h=head: value_of(entries, h, s)
                )
    return outcome


def nearest(part: Any, entries: Entries, head: int, asked: int, kept: list[int]) -> Best:
    row = key_of if part.likeness.value == "keys" else value_of
    own = row(entries, head, asked)
    return max(((cosine(own, row(entries, head, j)), j) for j in kept), key=lambda pair: pair[0])


def by_head(best: list[dict[int, Best]]) -> tuple[list[dict[int, float]], list[float]]:
    """What each entry is judged by, and the mean that the threshold of its head follows."""
    judged = [{s: u for s, (u, _) in head.items()} for head in best]
    return judged, [mean(list(head.values())) for head in judged]


def by_rank(best: list[dict[int, Best]]) -> tuple[list[dict[int, float]], list[float]]:
    ranks = [[u for _, (u, _) in sorted(head.items())] for head in best]
    longest = max(len(head) for head in ranks)
    means = [mean([head[r] for head in ranks if len(head) > r]) for r in range(longest)]
    judged = [{s: means[r] for r, s in enumerate(sorted(head))} for head in best]
    return judged, [mean([u for head in ranks for u in head])] * len(best)


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


def moved(beta: float, old: float, new: float) -> float:
    if math.isnan(new):
        return old
    return new if math.isnan(old) else beta * new + (1 - beta) * old


def merged(part: Any, into: list[tuple[float, int]], own: int, row: Any) -> list[float]:
    if part.weights.value == "average":
        shares, total = [(1.0, own), *((1.0, s) for _, s in into)], 1.0 + len(into)
    elif part.variant.value == "code":
        shares, total = [(1.0, own), *into], 1.0 + len(into)
    else:
        shares = [(math.e, own), *((math.exp(u), s) for u, s in into)]
        total = sum(weight for weight, _ in shares)
    rows = [(weight / total, row(s)) for weight, s in shares]
    return [sum(weight * numbers[d] for weight, numbers in rows) for d in range(len(rows[0][1]))]
