"""`leverage`: the diagonal of X (X'X + ridge)^-1 X', by elimination."""

from __future__ import annotations

import math
from typing import Any

import torch

from larder.core import Observation
from references.attention_loop import heads_of
from references.expected import dot, product, rotation, times

SMALL = {"sketch": 5, "ridge": 0.02, "seed": 2}  # parameters for small layers

Matrix = list[list[float]]


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    entries, start, held = (
        observation.entries,
        observation.entries.starts[head],
        observation.entries.lengths[head],
    )
    rows = range(start, start + held)
    at = [int(entries.effective_rope_positions[row]) for row in rows]
    keys = [
        times(rotation(observation, -position), entries.keys[row].tolist())
        for row, position in zip(rows, at, strict=True)
    ]
    if not keys:
        return []
    mean = [sum(column) / held for column in zip(*keys, strict=True)]
    centered = [[x - m for x, m in zip(key, mean, strict=True)] for key in keys]
    sketched = product(centered, sketch(part, observation.layer.head_dim))
    columns = [list(column) for column in zip(*sketched, strict=True)]
    gram = [[dot(a, b) for b in columns] for a in columns]
    size = len(gram)
    ridge = max(part.ridge * sum(gram[i][i] for i in range(size)) / size, 1e-19)
    for i in range(size):
        gram[i][i] += ridge
    return [dot(row, solved(gram, row)) for row in sketched]


def sketch(part: Any, size: int) -> Matrix:
    if part.sketch >= size:
        return [[float(a == b) for b in range(size)] for a in range(size)]
    source = torch.Generator().manual_seed(part.seed)
    drawn = torch.randn(size, part.sketch, generator=source).tolist()
    return [[x / math.sqrt(part.sketch) for x in row] for row in drawn]


def solved(matrix: Matrix, right: list[float]) -> list[float]:
    """The x of matrix x = right, by Gaussian elimination of a positive matrix."""
    rows = [[*row, number] for row, number in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        for lower in rows[i + 1 :]:
            factor = lower[i] / pivot[i]
            lower[:] = [a - factor * b for a, b in zip(lower, pivot, strict=True)]
    out = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        known = sum(rows[i][j] * out[j] for j in range(i + 1, len(rows)))
        out[i] = (rows[i][-1] - known) / rows[i][i]
    return out
