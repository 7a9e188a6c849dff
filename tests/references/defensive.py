"""`defensive`: the highest smoothed weight of each entry, lifted to the mean of these."""

from __future__ import annotations

from typing import Any


def joined(part: Any, rows: list[list[float]]) -> list[float]:
    smooth = [smoothed(part, row) for row in rows]
    return [max(row[entry] for row in smooth) for entry in range(len(rows[0]))]


def completed(part: Any, risks: list[float]) -> list[float]:
    floor = sum(risks) / len(risks) if risks else 0.0
    return [risk if risk > floor else floor for risk in risks]


def smoothed(part: Any, row: list[float]) -> list[float]:
    half = part.kernel // 2
    near = [sum(row[max(0, i - half) : i + half + 1]) / part.kernel for i in range(len(row))]
    total = sum(near)
    return [part_of * sum(row) / total if total else 0.0 for part_of in near]
