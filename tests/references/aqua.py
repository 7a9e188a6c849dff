"""`aqua`: every entry keeps the grade it has; prediction, transform and codes by loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from larder.core import Entries, LayerScores, Plan

Vector = Sequence[float]
Matrix = Sequence[Sequence[float]]


def grades(
    part: Any, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
) -> list[int]:
    """One grade per kept entry."""
    return [0] * len(plan.kept)


def hadamard_sum(vector: Vector, row: int) -> float:
    """One number of the transform of a vector whose length is a power of two."""
    signs = [(-1) ** bin(row & index).count("1") for index in range(len(vector))]
    return sum(s * x for s, x in zip(signs, vector, strict=True)) / math.sqrt(len(vector))


def held(vector: Vector, grid: Matrix, half: Any) -> list[float]:
    """Decoded vector: each pair of its transform is the nearest point times a scale.

    Args:
        half: rounds a number to float16.
    """
    turned = [hadamard_sum(vector, row) for row in range(len(vector))]
    scale = half(math.sqrt(sum(x * x for x in turned) / len(turned)))
    points: list[float] = []
    for first in range(0, len(turned), 2):
        x, y = turned[first] / scale, turned[first + 1] / scale
        points += min(grid, key=lambda p: (p[0] - x) ** 2 + (p[1] - y) ** 2)
    return [scale * hadamard_sum(points, row) for row in range(len(points))]


def predicted(weights: Matrix, bias: Vector, inputs: Vector) -> list[float]:
    """Prediction of one side of a token."""
    return [
        offset + sum(x * row[index] for x, row in zip(inputs, weights, strict=True))
        for index, offset in enumerate(bias)
    ]


def decoded_layer(
    token: tuple[Vector, Vector],
    sides: Sequence[tuple[Matrix, Vector]],
    below: Sequence[Vector],
    grid: Matrix,
    half: Any,
) -> tuple[list[float], list[float]]:
    """Keys before rotation and values of one token of a layer, as they are decoded.

    Args:
        sides: weights and bias of keys and of values.
        below: decoded keys and values of the token in the layer below; empty in the first one.
    """
    found: list[list[float]] = []
    for side, (weights, bias) in enumerate(sides):
        if not below:
            inputs: list[float] = []
        else:
            inputs = [*below[0]] if side == 0 else [*found[0], *below[1]]
        guess = predicted(weights, bias, inputs)
        left = [x - y for x, y in zip(token[side], guess, strict=True)]
        found.append([x + y for x, y in zip(guess, held(left, grid, half), strict=True)])
    return found[0], found[1]


def unrotated(vector: Vector, radians: Vector, position: int) -> list[float]:
    """Key before rotation."""
    plain = list(vector)
    for pair, speed in enumerate(radians):
        x, y, angle = vector[pair], vector[pair + len(radians)], -position * speed
        plain[pair] = x * math.cos(angle) - y * math.sin(angle)
        plain[pair + len(radians)] = y * math.cos(angle) + x * math.sin(angle)
    return plain
