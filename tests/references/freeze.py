"""FlowKV in plain Python: which positions stay when only the entries of a turn are judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Judge = Callable[[Sequence[int], int], list[int]]  # the best of some positions, so many


def frozen(turns: Sequence[Sequence[int]], kept: float, judge: Judge) -> list[list[int]]:
    """Positions of each turn that stay: every turn is judged once, when it ends."""
    return [judge(turn, int(kept * len(turn))) for turn in turns]


def judged_again(turns: Sequence[Sequence[int]], kept: float, judge: Judge) -> list[list[int]]:
    """Plan where every end of a turn judges everything that is left."""
    left: list[int] = []
    for turn in turns:
        left = [*left, *turn]
        parts = [[position for position in each if position in left] for each in turns]
        left = [p for part in parts if part for p in judge(part, int(kept * len(part)))]
    return [[position for position in left if position in each] for each in turns]
