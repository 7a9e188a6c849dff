"""`image_weight`: weights of image tokens times the factor."""

from __future__ import annotations

import math
from typing import Any

from references.weights_loop import as_weights

SMALL = {"factor": 3.0}  # parameters for small layers


def weighed(
    part: Any, scores: list[list[float]], values: Any, image: list[list[float]]
) -> list[list[float]]:
    """Args: image: share of each entry that is of an image, in a cache 0 or 1."""
    del values
    if not any(any(head) for head in image):
        return scores
    out = []
    for own, weights, marks in zip(scores, as_weights(scores), image, strict=True):
        triples = zip(own, weights, marks, strict=True)
        out.append(
            [
                weight * (mark * part.factor + 1 - mark) if math.isfinite(score) else score
                for score, weight, mark in triples
            ]
        )
    return out
