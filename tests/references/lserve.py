"""Two sizes of pages in plain Python: bounds of parts, pages, and how long a choice stands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from references.flat import united
from references.lloyd import Vector, dot
from references.recalling import largest

SMALL = {"page": 8, "part": 4, "keep": 1}  # parameters for small layers


def bound(query: Vector, keys: Sequence[Vector]) -> float:
    """Upper bound of the products with some keys, by the box around them."""
    return sum(
        max(q * max(key[d] for key in keys), q * min(key[d] for key in keys))
        for d, q in enumerate(query)
    )


def bounds(query: Vector, keys: Sequence[Vector], page: int, part: int) -> list[float]:
    """The highest bound of the parts of each page."""
    return [
        max(
            bound(query, keys[at : min(at + part, first + page)])
            for at in range(first, min(first + page, len(keys)), part)
        )
        for first in range(0, len(keys), page)
    ]


def found(
    part: Any, queries: Sequence[Vector], keys: Sequence[Sequence[Vector]], count: int
) -> list[list[int]]:
    """Pages of each kv head, as the contract tests ask for them."""
    group, answer = len(queries) // len(keys), []
    for k, own in enumerate(keys):
        lists = []
        for query in queries[k * group : (k + 1) * group]:
            scores = bounds(query, own, part.page, part.part)
            if scores:
                scores[-1] = math.inf  # the newest
            lists.append(largest(scores, count))
        answer.append(united(lists, count))
    return answer


def holds(query: Vector, keys: Sequence[Vector], page: int, part: int) -> bool:
    """True if no key of a page has a larger product than the page's bound."""
    own = bounds(query, keys, page, part)
    return all(dot(query, key) <= own[n // page] + 1e-6 for n, key in enumerate(keys))
