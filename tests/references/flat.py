"""Flat in plain Python: every product, every page, sorted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Vector = Sequence[float]


def bests(query: Vector, keys: Sequence[Vector], page: int) -> list[float]:
    """The best product in each page of one head."""
    products = [sum(q * k for q, k in zip(query, key, strict=True)) for key in keys]
    return [max(products[at : at + page]) for at in range(0, len(products), page)]


def ranked(scores: Sequence[float], count: int) -> list[int]:
    """Numbers of the best, the best first; of equals the lower number."""
    order = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
    return order[:count]


def united(lists: Sequence[Sequence[int]], count: int) -> list[int]:
    """All firsts, all seconds, ...; each once."""
    found: list[int] = []
    for index in range(max(map(len, lists), default=0)):
        for each in lists:
            if index < len(each) and each[index] not in found:
                found.append(each[index])
    return found[:count]


def find(
    queries: Sequence[Vector], keys: Sequence[Sequence[Vector]], page: int, count: int
) -> list[list[int]]:
    """Pages of each kv head."""
    group = len(queries) // len(keys)
    answer = []
    for head, own in enumerate(keys):
        asked = queries[head * group : (head + 1) * group]
        answer.append(united([ranked(bests(query, own, page), count) for query in asked], count))
    return answer


def found(
    part: Any, queries: Sequence[Vector], keys: Sequence[Sequence[Vector]], count: int
) -> list[list[int]]:
    """Pages of each kv head, as the contract tests ask for them."""
    return find(queries, keys, part.page, count)
