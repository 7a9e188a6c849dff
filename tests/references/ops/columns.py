"""Column statistics, one query and one entry at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def weights_of(
    query: list[float], keys: list[list[float]], scaling: float, added: list[float]
) -> list[float]:
    products = [sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    logits = [scaling * product + more for product, more in zip(products, added, strict=True)]
    peak = max(logits)
    exponentials = [math.exp(logit - peak) for logit in logits]
    return [exponential / sum(exponentials) for exponential in exponentials]


def columns(
    queries: Tensor,
    keys: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scaling: float,
    over_queries: str,
    over_group: str,
    positions: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`over_queries` and `over_group` are max, sum or mean."""
    fold = {"max": max, "sum": sum, "mean": lambda numbers: sum(numbers) / len(numbers)}
    num_heads, query_len, _ = queries.shape
    group = num_heads // len(lengths)
    packed: list[float] = []
    for head, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        first = len(packed)
        own = keys[start : start + length].double().tolist()
        seen_by: list[list[list[float]]] = []  # [R][Q][S]
        for h in range(head * group, (head + 1) * group):
            rows = []
            for q in range(query_len):
                visible = list(range(length))
                if positions is not None:
                    limit = int(positions[0][q])
                    visible = [s for s in visible if int(positions[1][first + s]) <= limit]
                row = [0.0] * length
                if visible:
                    added = [0.0 if bias is None else float(bias[start + s]) for s in visible]
                    shares = weights_of(
                        queries[h, q].double().tolist(), [own[s] for s in visible], scaling, added
                    )
                    for s, share in zip(visible, shares, strict=True):
                        row[s] = share
                rows.append(row)
            seen_by.append(rows)
        for s in range(length):
            per_head = [fold[over_queries]([row[s] for row in rows]) for rows in seen_by]
            packed.append(fold[over_group](per_head))
    return torch.tensor(packed)
