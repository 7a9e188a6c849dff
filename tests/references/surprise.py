"""`surprise`: -log of the softmax of a token's own logit."""

from __future__ import annotations

import math


def numbers(logits: list[list[float]], ids: list[int]) -> list[float]:
    out: list[float] = []
    for row, token in zip(logits, ids, strict=True):
        total = sum(math.exp(logit) for logit in row)
        out.append(-math.log(math.exp(row[token]) / total))
    return out
