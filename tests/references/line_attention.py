"""Lines of attention, one weight at a time: each key and each distance is a set of pairs."""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[int, int]
Line = tuple[int, int]  # 0 and a key, or 1 and a distance


def lines_of(positions: Sequence[int], places: Sequence[int]) -> dict[Line, set[Pair]]:
    """Pairs of a query and a key that it sees, by line; keys come first."""
    pairs = [(q, s) for q, at in enumerate(positions) for s, own in enumerate(places) if own <= at]
    lines: dict[Line, set[Pair]] = {(0, s): set() for s in range(len(places))}
    for distance in sorted({positions[q] - places[s] for q, s in pairs}):
        lines[1, distance] = set()
    for q, s in pairs:
        lines[0, s].add((q, s))
        lines[1, positions[q] - places[s]].add((q, s))
    return lines


def chosen(
    weights: Sequence[Sequence[float]],
    positions: Sequence[int],
    places: Sequence[int],
    coverage: float,
) -> list[Line]:
    """Lines in order of choice: distance 0, then those of most weight that is not covered."""
    lines = lines_of(positions, places)
    covered: set[Pair] = set()
    taken: list[Line] = []
    total = sum(map(sum, weights))

    def gain(line: Line) -> float:
        return sum(weights[q][s] for q, s in lines[line] - covered)

    while sum(weights[q][s] for q, s in covered) < coverage * total * (1 - 1e-6):
        rest = [line for line in lines if line not in taken]
        taken.append(max(rest, key=gain) if taken else (1, 0))
        covered |= lines[taken[-1]]
    return taken
