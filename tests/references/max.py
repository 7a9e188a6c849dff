"""`max`: the highest weight that any query gives."""

from __future__ import annotations

from typing import Any


def joined(part: Any, rows: list[list[float]]) -> list[float]:
    out = [0.0] * len(rows[0])
    for row in rows:
        for entry, weight in enumerate(row):
            if weight > out[entry]:
                out[entry] = weight
    return out
