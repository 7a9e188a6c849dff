"""Division of components in groups, by trying all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Group = tuple[int, int]  # size and bits


def divisions(width: int, options: list[Group], start: int = 0) -> Iterator[list[Group]]:
    """All divisions of the components from `start` on."""
    if start == width:
        yield []
        return
    for size, bits in options:
        if start % size == 0 and start + size <= width:
            for rest in divisions(width, options, start + size):
                yield [(size, bits), *rest]


def cost(group: Group) -> int:
    size, bits = group
    return size * bits + 32 if bits else 0


def error(groups: list[Group], errors: Mapping[Group, list[float]]) -> float:
    total, start = 0.0, 0
    for size, bits in groups:
        total += errors[size, bits][start // size]
        start += size
    return total


def least_error(errors: Mapping[Group, list[float]], width: int, budget: int) -> float:
    """Least sum of errors of a division that fits the budget."""
    fitting = (own for own in divisions(width, list(errors)) if sum(map(cost, own)) <= budget)
    return min(error(own, errors) for own in fitting)
