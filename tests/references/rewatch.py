"""Re-selection in plain Python: attention summed over the latest queries."""

from __future__ import annotations

from collections.abc import Sequence

from references.lloyd import Vector
from references.recalling import attention, largest, of_groups


def chosen(
    steps: Sequence[Sequence[Vector]], keys: Sequence[Sequence[Vector]], count: int, scaling: float
) -> list[list[int]]:
    """Entries of each kv head that the queries of some steps attend to most.

    Args:
        steps: queries of every query head, step by step.
    """
    each = [of_groups(attention(queries, keys, scaling), len(keys)) for queries in steps]
    totals = [
        [sum(numbers) for numbers in zip(*(step[k] for step in each), strict=True)]
        for k in range(len(keys))
    ]
    return [largest(total, count) for total in totals]


def standing(every: int, steps: int) -> list[int]:
    """The step at which the choice was made that stands at each step."""
    return [step - step % every for step in range(steps)]
