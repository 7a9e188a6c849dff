"""`eviction_error`: a least number for every layer, the rest by error, up to a cap."""

from __future__ import annotations

from typing import Any

from references.sensitivity import shares
from references.uniform import choose

SMALL = {"least": 7, "most": 2.0}  # parameters for small layers

__all__ = ["choose", "layer_tokens"]


def layer_tokens(
    part: Any, tokens: int, layers: int, least: int, most: int, calibration: Any
) -> list[float]:
    if tokens >= most:
        return [float(tokens)] * layers
    floor = max(least, min(part.least, tokens))
    cap = min(int(part.most * tokens), most)
    rest = shares(layers * (tokens - floor), list(calibration["eviction_error"]), 0, cap - floor)
    return [floor + own for own in rest]
