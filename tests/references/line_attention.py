"""Lines of attention, one weight at a time: each key and each distance is a set of pairs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Pair = tuple[int, int]
Line = tuple[int, int]  # 0 and a key, or 1 and a distance


def lines_of(positions: Sequence[int], indices: Sequence[int]) -> dict[Line, set[Pair]]:
    """Pairs of a query and a key that it sees, by line; keys come first."""
    pairs = [(q, s) for q, at in enumerate(positions) for s, own in enumerate(indices) if own <= at]
    lines: dict[Line, set[Pair]] = {(0, s): set() for s in range(len(indices))}
    for distance in sorted({positions[q] - indices[s] for q, s in pairs}):
        lines[1, distance] = set()
    for q, s in pairs:
        lines[0, s].add((q, s))
        lines[1, positions[q] - indices[s]].add((q, s))
    return lines


def is_chosen(
    found: Collection[Line],
    weights: Sequence[Sequence[float]],
    positions: Sequence[int],
    indices: Sequence[int],
    coverage: float,
) -> bool:
    """True if lines are distance 0, then those of most weight that is not covered, until all needed
    weight is; lines whose weights differ by rounding stand for each other."""
    lines = lines_of(positions, indices)
    covered, left = set(lines[1, 0]), set(found) - {(1, 0)}
    tolerance = 1e-5 * sum(map(sum, weights))
    needed = coverage * sum(map(sum, weights))
    while sum(weights[q][s] for q, s in covered) < needed - tolerance:
        gains = gains_of(lines, weights, covered)
        best = max(left, key=gains.__getitem__, default=None)
        if best is None or gains[best] < max(gains.values()) - tolerance:
            return False
        left.remove(best)
        covered |= lines[best]
    return (1, 0) in found and not left


def gains_of(
    lines: Mapping[Line, set[Pair]], weights: Sequence[Sequence[float]], covered: set[Pair]
) -> dict[Line, float]:
    """Weight of the pairs of each line that are not covered."""
    return {line: sum(weights[q][s] for q, s in pairs - covered) for line, pairs in lines.items()}
