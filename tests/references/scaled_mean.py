"""`scaled_mean`: what an entry gets on average, times the number of entries that a query sees."""

from __future__ import annotations

from typing import Any


def joined(part: Any, rows: list[list[float]]) -> list[float]:
    seen = [sum(weight > 0 for weight in row) for row in rows]
    pairs = list(zip(seen, rows, strict=True))
    return [
        sum(count * row[entry] for count, row in pairs) / len(rows) for entry in range(len(rows[0]))
    ]
