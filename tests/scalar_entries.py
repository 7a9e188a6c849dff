"""One head whose keys are plain numbers, for compensations worked out by hand."""

from __future__ import annotations

import torch

from larder.cache import merge_entries
from larder.core import LOG_COUNT, Entries, LayerScores, Plan


def line(positions: list[int], keys: list[float], counts: list[int]) -> Entries:
    """One head whose keys are numbers, with values ten times as large."""
    rows = torch.tensor(keys)[:, None]
    logs = torch.tensor([float(n) for n in counts]).log()
    indices, columns = torch.tensor(positions, dtype=torch.int32), {LOG_COUNT: logs}
    return Entries(rows, 10 * rows, indices, (0,), (len(keys),), columns)


def judged(scores: list[float], protected: tuple[int, ...] = ()) -> LayerScores:
    spared = torch.tensor([index in protected for index in range(len(scores))])
    return LayerScores(torch.tensor(scores), spared, (len(scores),))


def numbers(plan: Plan, entries: Entries) -> tuple[list[float], list[float], list[float]]:
    """Keys, values and counts of the kept entries of a line."""
    merged, keys, values = (
        merge_entries(plan, entries),
        entries.keys.clone(),
        entries.values.clone(),
    )
    keys[merged.targets], values[merged.targets] = merged.keys, merged.values
    logs = plan.columns.get(LOG_COUNT, entries.columns[LOG_COUNT][plan.kept])
    return keys[plan.kept, 0].tolist(), values[plan.kept, 0].tolist(), logs.exp().tolist()
