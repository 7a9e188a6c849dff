"""`group_and_layer`: the mean of the own group, plus the mean over the kv heads that hold it."""

from __future__ import annotations

from typing import Any

from references import group_mean


def joined(
    part: Any, statistics: list[list[list[float]]], positions: list[list[int]]
) -> list[list[float]]:
    own = group_mean.joined(part, statistics, positions)
    return [
        [mine + layer(position, own, positions) for mine, position in zip(head, held, strict=True)]
        for head, held in zip(own, positions, strict=True)
    ]


def layer(position: int, own: list[list[float]], positions: list[list[int]]) -> float:
    means = [
        head[held.index(position)]
        for head, held in zip(own, positions, strict=True)
        if position in held
    ]
    return sum(means) / len(means)
