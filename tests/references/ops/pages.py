"""Pages of entries, one entry at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from references.ops.softmax import capped


def entries_of(pool: Tensor, table: Tensor, lengths: Tensor) -> list[list[Tensor]]:
    """Rows of each segment, in order."""
    size = pool.shape[1]
    return [
        [pool[int(pages[index // size]), index % size] for index in range(length)]
        for pages, length in zip(table, lengths.tolist(), strict=True)
    ]


def after_eviction(
    pool: Tensor, table: Tensor, lengths: Tensor, kept: Sequence[Sequence[int]]
) -> list[list[Tensor]]:
    """Rows that each segment keeps, in order."""
    held = entries_of(pool, table, lengths)
    return [[rows[index] for index in own] for rows, own in zip(held, kept, strict=True)]


def column_mass(
    queries: Tensor,
    keys: Tensor,
    table: Tensor,
    lengths: Tensor,
    scaling: float,
    over_group: str,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> list[list[float]]:
    """Attention weights of each entry, summed over queries, then joined over query heads."""
    join = {"max": max, "sum": sum, "mean": lambda numbers: sum(numbers) / len(numbers)}[over_group]
    masses: list[list[float]] = []
    held = entries_of(keys, table, lengths)
    added = None if bias is None else entries_of(bias, table, lengths)
    for segment, rows in enumerate(held):
        by_head: list[list[float]] = []
        for head in queries[segment].double():
            sums = [0.0] * len(rows)
            for query in head.tolist():
                logits: list[float] = []
                for index, row in enumerate(rows):
                    logit = scaling * sum(a * b for a, b in zip(query, row.tolist(), strict=True))
                    extra = 0.0 if added is None else float(added[segment][index])
                    logits.append(capped(logit, softcap) + extra)
                peak = max(logits, default=0.0)
                raised = [math.exp(logit - peak) for logit in logits]
                sums = [s + weight / sum(raised) for s, weight in zip(sums, raised, strict=True)]
            by_head.append(sums)
        masses.append([join([sums[index] for sums in by_head]) for index in range(len(rows))])
    return masses


def after_step_eviction(
    entries: Mapping[str, Tensor],
    table: Tensor,
    lengths: Sequence[int],
    limits: Sequence[tuple[int, int, int]],
    rates: Sequence[float],
    thresholds: list[float],
    newest: int,
) -> list[list[dict[str, Any]]]:
    """Entries of each segment behind an eviction, as dictionaries of their numbers.

    Args:
        entries: pools by name; `mass` has the scores, `log_count` what entries stand for.
        limits: entries that stay, and the positions before and from which all do.
        rates: 0 where what is rejected is dropped.
        thresholds: of each segment, NaN before the first; changed in place.
    """
    held = {name: entries_of(pool, table, torch.tensor(lengths)) for name, pool in entries.items()}
    left: list[list[dict[str, Any]]] = []
    for segment, length in enumerate(lengths):
        rows: list[dict[str, Any]] = [
            {name: own[segment][index].double().tolist() for name, own in held.items()}
            for index in range(length)
        ]
        count, first, stop = limits[segment]
        if length > count:
            spared = [row["positions"] < first or row["positions"] >= stop for row in rows]
            ranks = [math.inf if s else row["mass"] for s, row in zip(spared, rows, strict=True)]
            victim = max(index for index, rank in enumerate(ranks) if rank == min(ranks))
            gone = rows.pop(victim)
            if rates[segment] and rows:
                tau = merge_rejected(gone, rows, rates[segment], thresholds[segment], newest)
                thresholds[segment] = tau
        left.append(rows)
    return left


def merge_rejected(
    gone: dict[str, Any], rows: list[dict[str, Any]], rate: float, threshold: float, newest: int
) -> float:
    """Merge an entry into the most similar one, if it is above the threshold, which is returned."""
    cosines = [cosine(gone["keys"], row["keys"]) for row in rows]
    target, best = rows[cosines.index(max(cosines))], max(cosines)
    threshold = best if math.isnan(threshold) else rate * best + (1 - rate) * threshold
    if best >= threshold - 1e-5:
        rates = [row["mass"] / (newest + 1 - row["positions"]) for row in (gone, target)]
        share = rates[0] / rates[1]
        pairs = zip(gone["values"], target["values"], strict=True)
        target["values"] = [(share * lost + kept) / (1 + share) for lost, kept in pairs]
        target["log_count"] += math.log(1 + share)
    return threshold


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Cosine of the angle between two vectors."""
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / math.sqrt(sum(a * a for a in one) * sum(b * b for b in other))
