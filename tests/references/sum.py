"""`sum`: what an entry got from all queries."""

from __future__ import annotations

from typing import Any


def joined(part: Any, rows: list[list[float]]) -> list[float]:
    """One number per entry from one row of weights per query."""
    out = [0.0] * len(rows[0])
    for row in rows:
        for entry, weight in enumerate(row):
            out[entry] += weight
    return out
