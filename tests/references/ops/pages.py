"""Pages of entries, one entry at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
