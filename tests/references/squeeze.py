"""`squeeze`: the layers of the highest of three groups get p averages."""

from __future__ import annotations

import math
from typing import Any

from references.sensitivity import shares
from references.uniform import choose

__all__ = ["choose", "layer_tokens"]


def layer_tokens(
    part: Any, tokens: int, layers: int, least: int, most: int, calibration: Any
) -> list[float]:
    if tokens >= most:
        return [float(tokens)] * layers
    highest = group(list(calibration["squeeze"]))
    if len(highest) == layers:
        return [float(tokens)] * layers
    large = (layers - part.p * len(highest)) / (layers - len(highest))
    weights = [part.p if layer in highest else large for layer in range(layers)]
    return shares(layers * tokens, weights, least, most)


def group(values: list[float]) -> set[int]:
    """Every way to put numbers into three groups by two limits; the one of the least scatter."""
    different = sorted(set(values))
    wanted = min(3, len(different))
    least, found = math.inf, set(range(len(values)))
    for low in different:
        for high in different:
            parts = [
                [v for v in values if v < low],
                [v for v in values if low <= v < high],
                [v for v in values if v >= max(low, high)],
            ]
            parts = [part for part in parts if part]
            if low > high or len(parts) != wanted:
                continue
            total = sum((v - sum(part) / len(part)) ** 2 for part in parts for v in part)
            if total < least - 1e-12:
                least, found = total, {i for i, v in enumerate(values) if v >= max(low, high)}
    return found
