"""`mean_variance`: mean plus gamma times the variance over queries, two passes over all rows."""

from __future__ import annotations

from typing import Any

SMALL = {"gamma": 2.0}  # parameters for small layers


def joined(part: Any, rows: list[list[float]]) -> list[float]:
    out = []
    for entry in range(len(rows[0])):
        mean = sum(row[entry] for row in rows) / len(rows)
        squares = sum((row[entry] - mean) ** 2 for row in rows)
        variance = squares / (len(rows) - 1) if len(rows) > 1 else 0.0
        out.append(mean + part.gamma * variance)
    return out
