"""The longest beginning of a text that is kept, by looking at every text that was ever kept."""

from __future__ import annotations

from collections.abc import Sequence


def longest(kept: Sequence[Sequence[int]], ids: Sequence[int], size: int) -> int:
    """Tokens that a text shares with the kept whole chunks of some text."""
    best = 0
    for text in kept:
        whole = text[: len(text) // size * size]
        count = 0
        while count < min(len(whole), len(ids)) and whole[count] == ids[count]:
            count += 1
        best = max(best, count)
    return best
