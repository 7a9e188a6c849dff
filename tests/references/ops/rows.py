"""Weights of stored rows, one query and one row at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def row_weights(
    queries: Tensor,
    keys: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scaling: float,
    over_group: str,
    bias: Tensor | None = None,
) -> Tensor:
    """`over_group` is max, sum or mean."""
    join = {"max": max, "sum": sum, "mean": lambda numbers: sum(numbers) / len(numbers)}[over_group]
    weights = torch.zeros(len(keys))
    group = len(queries) // len(lengths)
    for head, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        rows = range(start, start + length)
        by_head: list[dict[int, float]] = []
        for r in range(group):
            sums = dict.fromkeys(rows, 0.0)
            for query in queries[head * group + r].double().tolist():
                raised = {}
                for row in rows:
                    products = [a * b for a, b in zip(query, keys[row].tolist(), strict=True)]
                    added = 0.0 if bias is None else float(bias[row])
                    raised[row] = math.exp(scaling * sum(products) + added)
                for row in rows:
                    sums[row] += raised[row] / sum(raised.values())
            by_head.append(sums)
        for row in rows:
            weights[row] = join([sums[row] for sums in by_head])
    return weights
