"""Folding by plain numbers: running means, weights of folds, and sums of rows."""

from __future__ import annotations

import math


def followed_means(
    numbers: list[float], groups: list[int], before: list[float], rate: float
) -> list[float]:
    moved: list[float] = []
    for group, old in enumerate(before):
        own = [number for number, of in zip(numbers, groups, strict=True) if of == group]
        mean = sum(own) / len(own) if own else math.nan
        if math.isnan(mean):
            moved.append(old)
        else:
            moved.append(mean if math.isnan(old) else rate * mean + (1 - rate) * old)
    return moved


def weighed(
    sources: list[int], targets: list[int], given: list[float], counted: list[float], own: float
) -> list[tuple[int, int, float]]:
    totals = {target: own for target in sorted(targets)}
    for target, count in zip(targets, counted, strict=True):
        totals[target] += count
    rows = list(zip(sources, targets, given, strict=True))
    folds = [(source, target, weight / totals[target]) for source, target, weight in rows]
    return folds + [(target, target, own / total) for target, total in totals.items()]


def weighted_sums(
    held: list[list[float]], sources: list[int], targets: list[int], weights: list[float]
) -> dict[int, list[float]]:
    """New row of each target, from the packed rows."""
    sums = {target: [0.0] * len(held[0]) for target in sorted(targets)}
    for source, target, weight in zip(sources, targets, weights, strict=True):
        sums[target] = [
            total + weight * number
            for total, number in zip(sums[target], held[source], strict=True)
        ]
    return sums


def spread_folds(
    mass: list[float],
    spans: list[tuple[int, int]],
    keep: list[bool],
    window: int,
    drawn: list[float],
) -> list[tuple[int, int, float]]:
    """Sources, targets and weights of values, of packed entries whose heads have these spans."""
    folds: list[tuple[int, int, float]] = []
    gone = [index for index, stays in enumerate(keep) if not stays]
    for number, index in enumerate(gone):
        [stop] = [stop for start, stop in spans if start <= index < stop]
        behind = [other for other in range(index, stop) if keep[other]]
        following = behind[:window]
        total = sum(mass[other] for other in behind)
        if total:
            share = min(mass[index] * len(behind) / total, 1.0)
        else:
            share = float(bool(following) and mass[index] > 0)
        if drawn:
            share = float(drawn[number] < share)
        folds += [(index, other, share / len(following)) for other in following if share]
    own = sorted({target for _, target, _ in folds})
    return folds + [(target, target, 1.0) for target in own]
