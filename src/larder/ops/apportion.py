"""Splitting a whole number by weights, so that the parts sum exactly."""

from __future__ import annotations

from collections.abc import Sequence


def apportion(total: int, weights: Sequence[float], least: int) -> tuple[int, ...]:
    """Whole parts of `total` in proportion to `weights`, none below `least`, summing exactly.

    Parts that would fall below the floor get it, and the others are scaled down; this repeats
    until no part is below. Fractions go to the largest remainders, the earlier part first.

    Raises:
        ValueError: the floors alone exceed the total, or a weight is negative.
    """
    if least * len(weights) > total:
        raise ValueError(f"{len(weights)} parts of at least {least} exceed {total}.")
    if min(weights) < 0:
        raise ValueError(f"Weights must be 0 or more, got {min(weights)}.")
    shares = _raised(total, list(weights), least)
    parts = [int(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - shares[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def _raised(total: int, weights: list[float], least: int) -> list[float]:
    """Real shares of `total` with a floor."""
    floored: set[int] = set()
    while True:
        free = [i for i in range(len(weights)) if i not in floored]
        mass = sum(weights[i] for i in free)
        room = total - least * len(floored)
        shares = [float(least)] * len(weights)
        for i in free:
            shares[i] = room * weights[i] / mass if mass > 0 else room / len(free)
        low = {i for i in free if shares[i] < least}
        if not low:
            return shares
        floored |= low
