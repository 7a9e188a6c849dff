"""`entire`: runs of equal scores, the best first; one that does not fit is skipped."""

from __future__ import annotations

from typing import Any

from references.choosing_loop import Ranked, best
from references.uniform import Layers, Measures, layer_tokens

__all__ = ["choose", "layer_tokens"]


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    return {
        index: [of_head(entries, quotas[index]) for entries in heads]
        for index, heads in layers.items()
    }


def of_head(entries: list[Ranked], quota: int) -> list[int]:
    taken = [s for s in best(entries, quota) if entries[s][1]]
    runs: list[list[int]] = []
    for s, (score, shield) in enumerate(entries):
        if shield:
            continue
        goes_on = runs and runs[-1][-1] == s - 1 and entries[s - 1][0] == score
        runs[-1].append(s) if goes_on else runs.append([s])
    for run in sorted(runs, key=lambda run: -entries[run[0]][0]):
        if len(taken) + len(run) <= quota:
            taken += run
    return sorted(taken)
