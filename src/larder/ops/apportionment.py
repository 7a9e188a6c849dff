"""Apportionment of a whole number by weights, with an exact sum."""

from __future__ import annotations

from collections.abc import Sequence

HALVINGS = 200  # bisection steps for the common factor: beyond float64's precision


Bound = int | Sequence[int]


def apportion(total: int, weights: Sequence[float], least: Bound, most: Bound) -> tuple[int, ...]:
    """Integer parts of `total` in proportion to `weights`, within [least, most], summing exactly.

    Every part is its weight times one common factor, clamped to its bounds; the factor is found by
    bisection. Fractions go to the largest remainders, the earlier part first.

    Args:
        least, most: bounds of every part, or one for each.

    Raises:
        ValueError: the bounds do not admit the total, or a weight is negative.
    """
    lows, highs = _bounds(least, len(weights)), _bounds(most, len(weights))
    crossed = any(low > high for low, high in zip(lows, highs, strict=True))
    if crossed or not sum(lows) <= total <= sum(highs):
        raise ValueError(f"{len(weights)} parts in [{least}, {most}] cannot sum to {total}.")
    if min(weights) < 0:
        raise ValueError(f"Weights must be 0 or more, got {min(weights)}.")
    shares = _shares(total, weights, lows, highs)
    parts = [int(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - shares[i], i))
    open_parts = [i for i in by_remainder if parts[i] < highs[i]]
    for i in open_parts[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def _bounds(bound: Bound, count: int) -> list[int]:
    return [bound] * count if isinstance(bound, int) else list(bound)


def _shares(
    total: int, weights: Sequence[float], lows: Sequence[int], highs: Sequence[int]
) -> list[float]:
    """Real shares within the bounds; a weight of 0 counts as 1e-9 of the largest."""
    top = max(weights) or 1.0
    scaled = [max(weight / top, 1e-9) for weight in weights]

    def parts(factor: float) -> list[float]:
        bounds = zip(scaled, lows, highs, strict=True)
        return [min(max(factor * weight, float(low)), float(high)) for weight, low, high in bounds]

    low, high = 0.0, max(highs) / min(scaled)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(parts(middle)) < total:
            low = middle
        else:
            high = middle
    return parts(high)


def even_ranges(total: int, most: int) -> list[tuple[int, int]]:
    """Fewest ranges [start, stop) of at most `most` that cover [0, total).

    Lengths differ by at most one, the longer first, so that there is no short remainder.
    """
    if not total:
        return []
    count = -(-total // most)
    edges = [-(-total * number // count) for number in range(count + 1)]
    return list(zip(edges, edges[1:], strict=False))
