"""Splitting a whole number by weights, so that the parts sum exactly."""

from __future__ import annotations

from collections.abc import Sequence

HALVINGS = 200  # of the interval that holds the common factor: past float64's precision


def apportion(total: int, weights: Sequence[float], least: int, most: int) -> tuple[int, ...]:
    """Whole parts of `total` in proportion to `weights`, within [least, most], summing exactly.

    Every part is its weight times one common factor, cut to the bounds; the factor is found by
    bisection. Fractions go to the largest remainders, the earlier part first.

    Raises:
        ValueError: the bounds do not admit the total, or a weight is negative.
    """
    if not least * len(weights) <= total <= most * len(weights):
        raise ValueError(f"{len(weights)} parts in [{least}, {most}] cannot sum to {total}.")
    if min(weights) < 0:
        raise ValueError(f"Weights must be 0 or more, got {min(weights)}.")
    shares = _shares(total, weights, least, most)
    parts = [int(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - shares[i], i))
    open_parts = [i for i in by_remainder if parts[i] < most]
    for i in open_parts[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def _shares(total: int, weights: Sequence[float], least: int, most: int) -> list[float]:
    """Real shares within the bounds; weights of 0 count as next to nothing."""
    top = max(weights) or 1.0
    scaled = [max(weight / top, 1e-9) for weight in weights]
    low, high = 0.0, most / min(scaled)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(_cut(middle * weight, least, most) for weight in scaled) < total:
            low = middle
        else:
            high = middle
    return [_cut(high * weight, least, most) for weight in scaled]


def _cut(value: float, least: int, most: int) -> float:
    return min(max(value, float(least)), float(most))
