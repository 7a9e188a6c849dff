"""`pyramid`: quotas fall from layer to layer by the same step; every head keeps its own best."""

from __future__ import annotations

from typing import Any

from references.uniform import choose

__all__ = ["choose", "layer_tokens"]


def layer_tokens(
    part: Any, tokens: int, layers: int, least: int, most: int, calibration: object
) -> list[float]:
    """Tokens of each layer before rounding."""
    if tokens >= most or layers == 1:
        return [float(tokens)] * layers
    spare = tokens - least
    top = spare / part.beta
    bottom = 2 * spare - top
    if bottom > most - least:
        bottom = most - least
        top = 2 * spare - bottom
    groups = [index // part.layers for index in range(layers)]
    if not groups[-1]:
        return [float(tokens)] * layers
    step = (bottom - top) / groups[-1]
    deserved = [bottom - step * group for group in groups]
    scale = layers * spare / sum(deserved) if spare else 0.0
    return [least + own * scale for own in deserved]
