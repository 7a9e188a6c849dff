"""`park`: nothing is done for the rejected here; the cache parks them, all but those of a cut."""

from __future__ import annotations

from math import ceil, log2

from references.drop import settle

__all__ = ["dropped", "settle", "split"]


def split(held: int, budget: int) -> int:
    """RocketKV: the root of the way that goes by dropping, on a scale of doublings."""
    doublings = log2(held) - log2(budget)
    if doublings <= 0:
        return held
    root = 0.2 + 0.06 * doublings
    root = 0.8 if root > 0.8 else root
    return ceil(2.0 ** (log2(held) - root * doublings) - 1e-9)


def dropped(scores: list[list[float]], kept: list[list[int]], stays: int) -> list[list[int]]:
    """Per head the entries that go for good: one by one the worst of those that do not stay."""
    result = []
    most = max(stays, *(len(head) for head in kept))
    for own, mine in zip(scores, kept, strict=True):
        left, gone = list(range(len(own))), []
        while len(left) > most:
            worst = min(
                (s for s in left if s not in mine), key=lambda s: (own[s], -s), default=None
            )
            if worst is None:
                break
            left.remove(worst)
            gone.append(worst)
        result.append(sorted(gone))
    return result
