"""`sensitivity`: layer budgets by s^alpha with s = 1 - sigma, floors, largest remainders."""

from __future__ import annotations

import math
from typing import Any

from references.pooled import choose

__all__ = ["choose", "layer_tokens"]


def layer_tokens(
    part: Any, tokens: int, layers: int, least: int, most: int, calibration: Any
) -> list[float]:
    """Tokens of each layer before rounding."""
    if tokens >= most:
        return [float(tokens)] * layers
    sigma = calibration["sensitivity"]
    low, high = min(sigma), max(sigma)
    weights = []
    for value in sigma:
        share = 1.0
        if high > low:
            stretched = (value - low) / (high - low)
            share = 1 - stretched if part.variant.value == "code" else max(0.0, 1 - value)
        weights.append(share**part.alpha)
    share = part.floor
    if share is None:
        share = 0.0 if part.variant.value == "paper" else 0.25
    floor = least if share == 0 else max(least, math.floor(share * tokens), 1)
    return shares(layers * tokens, weights, min(floor, tokens), most)


def shares(
    total: int, weights: list[float], floor: int | list[int], most: int | list[int]
) -> list[float]:
    """Weights times one factor, cut to the bounds: walk the places where a part meets a bound."""
    scaled = [max(weight / (max(weights) or 1.0), 1e-9) for weight in weights]
    floors = [floor] * len(scaled) if isinstance(floor, int) else floor
    mosts = [most] * len(scaled) if isinstance(most, int) else most
    bounds = list(zip(scaled, floors, mosts, strict=True))

    def parts(factor: float) -> list[float]:
        return [min(max(factor * weight, low), high) for weight, low, high in bounds]

    before = 0.0
    for after in sorted(bound / weight for weight, *edges in bounds for bound in edges):
        if sum(parts(after)) >= total:
            rise = sum(parts(after)) - sum(parts(before))
            way = (total - sum(parts(before))) / rise if rise > 0 else 0.0
            return parts(before + way * (after - before))
        before = after
    return parts(before)
