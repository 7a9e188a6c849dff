"""`criticality`: a first part by weights, the rest by weight and epsilon times a value's size."""

from __future__ import annotations

import math
from typing import Any

from references.weights_loop import as_weights

SMALL = {"epsilon": 0.05}  # parameters for small layers

Matrix = list[list[float]]


def weighed(
    part: Any,
    scores: list[list[float]],
    values: list[Matrix],
    projections: list[list[Matrix]] | None = None,
) -> list[list[float]]:
    """Args: projections: of each kv head the matrices of its query heads, one row per channel."""
    out = []
    for head, weights in enumerate(as_weights(scores)):
        own = None if projections is None else projections[head]
        sizes = [size(value, own) for value in values[head]]
        if part.norms.value == "share":
            pairs = zip(sizes, scores[head], strict=True)
            total = sum(one for one, score in pairs if math.isfinite(score))
            sizes = [one / total if total else 0.0 for one in sizes]
        row = []
        for entry, weight in enumerate(weights):
            score = scores[head][entry]
            worth = (weight + part.epsilon) * sizes[entry]
            row.append(worth if math.isfinite(score) else score)
        out.append(row)
    return out


def size(value: list[float], matrices: list[Matrix] | None) -> float:
    if matrices is None:
        return sum(abs(x) for x in value)
    norms = []
    for matrix in matrices:
        columns = range(len(matrix[0]))
        projected = [sum(x * row[n] for x, row in zip(value, matrix, strict=True)) for n in columns]
        norms.append(sum(abs(x) for x in projected))
    return sum(norms) / len(norms)


def first(part: Any, ranks: list[float], sure: list[bool], quota: int) -> list[int]:
    """Entries of a head that stay before values count, beside those that are sure."""
    others = sorted((i for i in range(len(ranks)) if not sure[i]), key=lambda i: (-ranks[i], i))
    if part.mass is None:
        return sorted(others[: max(0, int(part.first * quota) - sum(sure))])
    held, chosen = sum(rank for rank, stays in zip(ranks, sure, strict=True) if stays), []
    for entry in others:
        held += ranks[entry]
        if held >= part.mass or len(chosen) + sum(sure) >= quota:
            break
        chosen.append(entry)
    return sorted(chosen)
