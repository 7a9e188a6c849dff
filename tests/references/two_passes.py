"""Tokens selected by several pooling widths, one at a time."""

from __future__ import annotations

from collections.abc import Sequence


def found(
    scores: Sequence[float], always: Sequence[bool], count: int, widths: Sequence[int]
) -> list[int]:
    """Indices of the tokens that are found: the widths take turns with their best ones."""
    taken = [token for token, stays in enumerate(always) if stays]
    count = max(count, len(taken))
    orders = []
    for width in widths:
        half = width // 2
        around = [scores[max(0, t - half) : t + half + 1] for t in range(len(scores))]
        pooled = [max(near) for near in around]
        orders.append(sorted(range(len(scores)), key=lambda token, p=pooled: (-p[token], token)))
    for turn in range(len(scores)):
        for order in orders:
            if order[turn] not in taken and len(taken) < count:
                taken.append(order[turn])
    return sorted(taken)
