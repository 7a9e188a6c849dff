"""`layer_mean`: all query heads whose kv head holds a position are averaged at that position."""

from __future__ import annotations

from typing import Any


def joined(
    part: Any, statistics: list[list[list[float]]], positions: list[list[int]]
) -> list[list[float]]:
    return [[mean_at(position, statistics, positions) for position in held] for held in positions]


def mean_at(
    position: int, statistics: list[list[list[float]]], positions: list[list[int]]
) -> float:
    means = [
        row[held.index(position)]
        for group, held in zip(statistics, positions, strict=True)
        if position in held
        for row in group
    ]
    return sum(means) / len(means)
