"""Scores read as weights, one after the other."""

from __future__ import annotations

import math


def as_weights(scores: list[list[float]]) -> list[list[float]]:
    """Finite scores from 0 on: raised together if one is negative; infinite ones weigh nothing."""
    lowest = min([0.0, *(score for head in scores for score in head if math.isfinite(score))])
    return [[score - lowest if math.isfinite(score) else 0.0 for score in head] for head in scores]
