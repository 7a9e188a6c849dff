"""InfiniGen in plain Python: how many entries come near the largest, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence

from references.lloyd import Vector, dot
from references.recalling import Rows, largest

SMALL = {"channels": 0.6, "most": 1.0}  # parameters for small layers


def logits(
    queries: Sequence[Vector], keys: Sequence[Sequence[Vector]], scaling: float
) -> list[list[float]]:
    """Of every query head, the products with the keys of its kv head."""
    group = len(queries) // len(keys)
    return [
        [scaling * dot(query, key) for key in keys[h // group]] for h, query in enumerate(queries)
    ]


def number(rows: Rows, alpha: float, most: int) -> int:
    """Mean over heads of the entries within alpha of the largest, without its fraction."""
    counts = [sum(logit > max(row) - alpha for logit in row) for row in rows if row]
    return max(1, min(int(sum(counts) / len(rows)), most))


def chosen(rows: Rows, kv_heads: int, fetched: int, count: int) -> list[list[int]]:
    """Entries of each kv head, by their least distance from a query head's largest product."""
    group, answer = len(rows) // kv_heads, []
    for k in range(kv_heads):
        own = rows[k * group : (k + 1) * group]
        away = [max(row[n] - max(row) for row in own) for n in range(len(own[0]))]
        answer.append(largest(away, count if len(away) <= count else min(count, fetched)))
    return answer
