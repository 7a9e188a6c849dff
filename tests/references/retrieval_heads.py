"""`retrieval_heads`: chosen heads have all that streaming heads leave."""

from __future__ import annotations

import math
from typing import Any

from builders import head_numbers
from references.sensitivity import shares
from references.uniform import Layers, Measures
from references.weighing_loop import by_weight

SMALL = {"share": 0.3}  # parameters for small layers


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    return {
        index: by_weight(heads, head_numbers(len(heads)), quotas[index] * len(heads), 0)
        for index, heads in layers.items()
    }


def retrieval_heads(part: Any, calibration: Any) -> set[int]:
    if part.trial.value == "passkeys":
        return best(calibration["streaming_error"], part.share)
    if part.trial.value == "gates":
        return best(calibration["duo_attention"], part.share)
    if part.trial.value == "copy":
        return best(calibration["reconstruction"], part.share)
    return best(calibration["echo"], part.share / 15) | best(
        calibration["induction"], part.share * 14 / 15
    )


def best(scores: tuple[float, ...], share: float) -> set[int]:
    chosen: set[int] = set()
    while len(chosen) < share * len(scores) - 1e-9:
        left = [head for head in range(len(scores)) if head not in chosen]
        chosen.add(max(left, key=lambda head: (scores[head], -head)))
    return chosen


def layer_tokens(
    part: Any, tokens: int, layers: int, least: int, most: int, calibration: Any
) -> list[float]:
    if tokens >= most:
        return [float(tokens)] * layers
    chosen, each = retrieval_heads(part, calibration), len(calibration["streaming_error"]) // layers
    counts = [sum(head // each == layer for head in chosen) for layer in range(layers)]
    room, total = most - least, layers * (tokens - least)
    filled = [math.ceil(count / each * room) for count in counts]
    if sum(filled) >= total:
        parts = shares(total, [count / each for count in counts], 0, filled)
    else:
        parts = shares(total, [1 - count / each for count in counts], filled, room)
    return [least + own for own in parts]
