"""Eviction of a decode step, one head and one entry after the other."""

from __future__ import annotations

import math
from typing import Any

from larder.core import StepColumn, StepRule, StepScore, StepSpreading

Entry = dict[str, Any]  # position, key, value and columns of an entry, by name


def evict(
    heads: list[list[Entry]],
    logits: list[list[list[float]]],
    rule: StepRule,
    count: int,
    first: int,
    stop: int,
) -> list[list[Entry]]:
    """Kept entries of every head.

    Args:
        logits: of each head, query head of its group and entry.
    """
    shares = [[softmax(row) for row in group] for group in logits]
    for entries, group in zip(heads, shares, strict=True):
        for s, entry in enumerate(entries):
            update(entry, [row[s] for row in group])
    kept = []
    for head, entries in enumerate(heads):
        scores = [score(heads, shares, rule, head, s) for s in range(len(entries))]
        ranked = [
            math.inf if entry["position"] < first or entry["position"] >= stop else number
            for entry, number in zip(entries, scores, strict=True)
        ]
        best_first = sorted(range(len(entries)), key=lambda s: (-ranked[s], s))
        stays = sorted(best_first[:count])
        if isinstance(rule.merging, StepSpreading):
            spread(entries, stays, head, rule.merging)
        kept.append([entries[s] for s in stays])
    return kept


def softmax(row: list[float]) -> list[float]:
    raised = [math.exp(logit - max(row)) for logit in row]
    return [each / sum(raised) for each in raised]


def update(entry: Entry, weights: list[float]) -> None:
    """Columns after the attention of one more query, of each query head of the group."""
    entry[StepColumn.MASS] += sum(weights)
    entry[StepColumn.NEWEST] = sum(weights)
    entry["history"] = [*entry["history"], sum(weights) / len(weights)]


def moments(entry: Entry) -> tuple[int, float, float]:
    """Count, mean and sum of squared deviations of all weights so far."""
    history = entry["history"]
    mean = sum(history) / len(history)
    return len(history), mean, sum((weight - mean) ** 2 for weight in history)


def score(heads: Any, shares: Any, rule: StepRule, head: int, s: int) -> float:
    entry, scoring = heads[head][s], rule.scoring
    if scoring.score is StepScore.MASS:
        return entry[StepColumn.MASS]
    if scoring.score is StepScore.POSITION:
        return math.inf if entry["position"] < scoring.sinks else entry["position"]
    if scoring.score is StepScore.LAYER_MEAN:
        rows = [row[s] for group in shares for row in group]
        return sum(rows) / len(rows)
    variances = [moments(each)[2] / moments(each)[0] for each in heads[head]]
    most_varied_first = sorted(range(len(variances)), key=lambda i: (-variances[i], i))
    raised = most_varied_first[: int(scoring.spared * len(variances))]
    return moments(entry)[1] + (s in raised)


def spread(entries: list[Entry], stays: list[int], head: int, rule: StepSpreading) -> None:
    """Add the value of each rejected entry to the next kept ones, as a single value."""
    before = [entry["joined"] for entry in entries]
    for s in range(len(entries)):
        behind = [j for j in stays if j > s]
        if s in stays or not behind:
            continue
        around = sum(entries[j][StepColumn.NEWEST] for j in behind) / len(behind)
        share = min(entries[s][StepColumn.NEWEST] / around, 1.0)
        if rule.seed is not None:
            share = float(chance(entries[s]["position"], head, rule.seed) < share)
        following = behind[: rule.window]
        for j in following:
            part = share / len(following)
            value = [number / (1 + before[s]) * part for number in entries[s]["value"]]
            pairs = zip(entries[j]["value"], value, strict=True)
            entries[j]["value"] = [a + b for a, b in pairs]
            entries[j]["joined"] += part


def chance(position: int, head: int, seed: int) -> float:
    """MurmurHash3's last steps over 32 bits."""
    h = ((position + 1) * 2654435769 + head * 2496678331 + seed * 2135587861) % 2**32
    h ^= h >> 16
    h = h * 2246822507 % 2**32
    h ^= h >> 13
    h = h * 3266489909 % 2**32
    h ^= h >> 16
    return h / 2**32
