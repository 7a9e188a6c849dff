"""A tree of keys in plain Python: built, searched, level by level, with lists for pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]


def levels(count: int, first: float, further: float) -> list[int]:
    """Counted promotion: a level takes its share of the one below as soon as it is due."""
    sizes: list[int] = []
    targets, due = [], 0
    for _ in range(count):
        target = due
        ratio = first if target == 0 else further
        if target == len(sizes):
            sizes.append(0)
            due = 0
        elif target == len(sizes) - 1:
            due = target + 1 if sizes[target] + 1 == math.ceil(1 / ratio) else 0
        else:
            due = target + 1 if sizes[target] + 1 >= sizes[target + 1] / ratio else 0
        sizes[target] += 1
        targets.append(target)
    return targets


def lifted(key: Vector, radius: float) -> list[float]:
    """T_K of the paper."""
    scaled = [number / radius for number in key]
    return [*scaled, math.sqrt(max(1 - dot(scaled, scaled), 0.0))]


def asked(query: Vector) -> list[float]:
    """T_Q of the paper."""
    norm = math.sqrt(dot(query, query))
    return [*(number / norm for number in query), 0.0]


def distance(one: Vector, other: Vector) -> float:
    return math.dist(one, other)


def dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def parents(keys: Sequence[Vector], targets: Sequence[int], radius: float) -> list[int]:
    """The nearest entry one level above each; -1 on the highest."""
    points = [lifted(key, radius) for key in keys]
    found = []
    for entry, target in enumerate(targets):
        above = [other for other, level in enumerate(targets) if level == target + 1]
        nearest = min(above, key=lambda o: distance(points[entry], points[o]), default=-1)
        found.append(nearest)
    return found


def pages(
    keys: Sequence[Vector], radius: float, direction: Vector, size: int, ratios: tuple[float, float]
) -> set[tuple[int, ...]]:
    """Pages: the entries of a cell, sorted along a direction, evenly divided."""
    targets = levels(len(keys), *ratios)
    above = parents(keys, targets, radius)
    cells: dict[tuple[int, int], list[int]] = {}
    for entry, target in enumerate(targets):
        cells.setdefault((target, above[entry]), []).append(entry)
    found = set()
    for members in cells.values():
        members.sort(key=lambda entry: dot(lifted(keys[entry], radius), direction))
        count = math.ceil(len(members) / size)
        short, longer = divmod(len(members), count)
        at = 0
        for page in range(count):
            end = at + short + (page < longer)
            found.add(tuple(sorted(members[at:end])))
            at = end
    return found
