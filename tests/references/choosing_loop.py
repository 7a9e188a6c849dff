"""Picking the best entries one at a time; of equals, the earlier."""

from __future__ import annotations

from collections.abc import Sequence

# Score and protection of one entry.
Ranked = tuple[float, bool]


def best(entries: Sequence[Ranked], count: int) -> list[int]:
    """Indices of the `count` best, ascending: protected ones first, then by score."""
    left, chosen = list(range(len(entries))), []
    while left and len(chosen) < count:
        top = left[0]
        for index in left:
            if beats(entries[index], entries[top]):
                top = index
        chosen.append(top)
        left.remove(top)
    return sorted(chosen)


def beats(one: Ranked, other: Ranked) -> bool:
    strength = float("inf") if one[1] else one[0]
    rival = float("inf") if other[1] else other[0]
    return strength > rival


def pool(heads: Sequence[Sequence[Ranked]], count: int) -> list[list[int]]:
    """The best of several heads together, told per head."""
    flat = [(h, s) for h, entries in enumerate(heads) for s in range(len(entries))]
    chosen = best([heads[h][s] for h, s in flat], count)
    return [[flat[i][1] for i in chosen if flat[i][0] == h] for h in range(len(heads))]
