"""Choice of a level as a loop: of all that is left, at each level, the time that it takes."""

from __future__ import annotations

from collections.abc import Sequence


def level(
    deadline: float,
    elapsed: float,
    sizes: Sequence[Sequence[int]],
    bandwidth: float,
    recompute: float,
) -> int | None:
    """Level of the next chunk by the rule of the paper; None for text."""
    if elapsed + recompute <= deadline:
        return None
    times = []
    for each in range(len(sizes[0])):
        seconds = elapsed
        for chunk in sizes:
            seconds += chunk[each] / bandwidth
        times.append(seconds)
        if seconds <= deadline:
            return each
    return None if elapsed + recompute < times[-1] else len(times) - 1
