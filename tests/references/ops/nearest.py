"""The most alike marked row of the same head, one pair at a time."""

from __future__ import annotations

import math

from torch import Tensor


def cosine(one: list[float], other: list[float]) -> float:
    norms = math.sqrt(sum(a * a for a in one)) * math.sqrt(sum(b * b for b in other))
    return sum(a * b for a, b in zip(one, other, strict=True)) / norms if norms else 0.0


def nearest_rows(
    rows: Tensor, starts: list[int], lengths: list[int], marked: list[bool]
) -> list[tuple[float, int]]:
    found, first = [], 0
    for start, length in zip(starts, lengths, strict=True):
        own = rows[start : start + length].double().tolist()
        for asked in range(length):
            if marked[first + asked]:
                continue
            best = (-math.inf, -1)
            for other in range(length):
                if marked[first + other]:
                    u = cosine(own[asked], own[other])
                    best = (u, first + other) if u > best[0] else best
            found.append(best)
        first += length
    return found
