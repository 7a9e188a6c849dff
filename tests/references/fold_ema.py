"""`fold_ema`: D2O's merging, one rejected entry at a time."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Entries, LayerScores
from references.ops.nearest import cosine
from references.outcome import Outcome, key_of, untouched, value_of

Best = tuple[float, int]  # likeness, and the kept entry of the head that is nearest


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
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
            if entry.kept not in folded:
                continue
            shares = weighed(part, entries, head, entry.kept, folded[entry.kept])
            entry.value = mixed(shares, [value_of(entries, head, s) for _, s in shares])
            if part.variant.value == "larder":
                entry.columns["log_count"] -= math.log(shares[0][0])
            else:
                entry.key = mixed(shares, [key_of(entries, head, s) for _, s in shares])
    return outcome


def nearest(part: Any, entries: Entries, head: int, asked: int, kept: list[int]) -> Best:
    row = key_of if part.likeness.value == "keys" else value_of
    own = row(entries, head, asked)
    return max(((cosine(own, row(entries, head, j)), j) for j in kept), key=lambda pair: pair[0])


def by_head(best: list[dict[int, Best]]) -> tuple[list[dict[int, float]], list[float]]:
    """Similarity of each entry, and the mean that the threshold of its head follows."""
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


def weighed(
    part: Any, entries: Entries, head: int, own: int, into: list[tuple[float, int]]
) -> list[tuple[float, int]]:
    """Shares of the kept entry itself, which comes first, and of what is merged into it."""
    defaults = {"larder": "attention", "paper": "exponential", "code": "likeness"}
    weights = part.weights.value
    if weights == "variant":
        weights = defaults[part.variant.value]
    if weights == "attention":
        row = entries.starts[head]
        newest = max(max_position(entries, h) for h in range(len(entries.lengths)))
        rates = {
            s: float(entries.columns["mass"][row + s])
            / (newest + 1 - int(entries.positions[row + s]))
            for s in (own, *(s for _, s in into))
        }
        shares = [(rates[own], own), *((rates[s], s) for _, s in into)]
    elif weights == "average":
        shares = [(1.0, own), *((1.0, s) for _, s in into)]
    elif weights == "exponential":
        shares = [(math.e, own), *((math.exp(u), s) for u, s in into)]
    else:
        shares = [(1.0, own), *into]
    total = sum(weight for weight, _ in shares)
    if part.variant.value == "code":
        total = shares[0][0] + len(into)
    return [(weight / total, s) for weight, s in shares]


def max_position(entries: Entries, head: int) -> int:
    return max((int(p) for p in entries.head_positions(head)), default=0)


def mixed(shares: list[tuple[float, int]], rows: list[list[float]]) -> list[float]:
    weights = [weight for weight, _ in shares]
    return [
        sum(w * x for w, x in zip(weights, numbers, strict=True))
        for numbers in zip(*rows, strict=True)
    ]
