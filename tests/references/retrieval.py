"""`retrieval`: the mean over the best heads that hold a position, else over the own group."""

from __future__ import annotations

from typing import Any

from builders import head_numbers

SMALL = {"heads": 2}  # parameters for small layers


def joined(
    part: Any, statistics: list[list[list[float]]], positions: list[list[int]]
) -> list[list[float]]:
    heads = [(k, r) for k, group in enumerate(statistics) for r in range(len(group))]
    scores = dict(zip(heads, head_numbers(len(heads)), strict=True))
    speaking = sorted(heads, key=lambda head: (-scores[head], head))[: part.heads]
    return [
        [
            mean_statistic(index, k, column, statistics, positions, speaking)
            for column, index in enumerate(held)
        ]
        for k, held in enumerate(positions)
    ]


def mean_statistic(
    index: int,
    own: int,
    column: int,
    statistics: list[list[list[float]]],
    positions: list[list[int]],
    speaking: list[tuple[int, int]],
) -> float:
    voices = [
        statistics[k][r][positions[k].index(index)] for k, r in speaking if index in positions[k]
    ]
    voices = voices or [row[column] for row in statistics[own]]
    return sum(voices) / len(voices)
