"""FASA in plain Python: how well each pair of dimensions agrees with all of them."""

from __future__ import annotations

from collections.abc import Sequence

from references.lloyd import Vector, dot


def pairs(head_dim: int, turned: int) -> list[tuple[int, int]]:
    """RoPE's halves, then what it leaves as it is, in halves too."""
    half = (head_dim - 2 * turned) // 2
    rest = [(2 * turned + d, 2 * turned + half + d) for d in range(half)]
    return [(d, d + turned) for d in range(turned)] + rest


def score(query: Vector, key: Vector, chosen: Sequence[tuple[int, int]]) -> float:
    return sum(query[d] * key[d] for pair in chosen for d in pair)


def agreement(
    queries: Sequence[Vector], keys: Sequence[Vector], pair: tuple[int, int], agreeing: int
) -> float:
    total = 0.0
    for query in queries:
        full = best([dot(query, key) for key in keys], agreeing)
        alone = best([score(query, key, [pair]) for key in keys], agreeing)
        total += len(full & alone) / max(len(full), len(alone))
    return total / len(queries)


def best(numbers: Sequence[float], count: int) -> set[int]:
    """Places of the largest, equals of the last of them included."""
    least = sorted(numbers, reverse=True)[:count][-1]
    return {index for index, number in enumerate(numbers) if number >= least}
