"""`rising_mean`: the mean of what an entry gets, the last query counting `last` times the first."""

from __future__ import annotations

from typing import Any

SMALL = {"last": 2.5}  # parameters for small layers


def joined(part: Any, rows: list[list[float]]) -> list[float]:
    out = [0.0] * len(rows[0])
    for index, row in enumerate(rows):
        share = index / (len(rows) - 1) if len(rows) > 1 else 0.0
        factor = (1 - share) * 1.0 + share * part.last
        out = [so_far + factor * weight for so_far, weight in zip(out, row, strict=True)]
    return [weight / len(rows) for weight in out]
