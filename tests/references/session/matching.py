"""The nearest centroid, and the threshold for a new episode, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

from references.session.clustering import Row, cosine


def dot(a: Row, b: Row) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def slow_match(
    question: Row, centroids: list[Row], nearness: Callable[[Row, Row], float] = cosine
) -> tuple[int, float]:
    best = 0
    for episode, centroid in enumerate(centroids):
        if nearness(question, centroid) > nearness(question, centroids[best]):
            best = episode
    return best, nearness(question, centroids[best])


def slow_tau(
    turns: list[Row], folds: list[int], form: Callable[[list[Row]], list[Row]], quantile: float
) -> float:
    """Each turn against the centroids that `form` makes of the turns in the other folds."""
    similarities = sorted(
        slow_match(turn, form([t for t, f in zip(turns, folds, strict=True) if f != fold]))[1]
        for turn, fold in zip(turns, folds, strict=True)
    )
    position = quantile * (len(similarities) - 1)
    low, high = similarities[math.floor(position)], similarities[math.ceil(position)]
    return low + (high - low) * (position - math.floor(position))
