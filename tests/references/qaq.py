"""`qaq`: bits of each entry from the error that its key and its value may have."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Entries, LayerScores, Observation, Plan
from references.attention_loop import group_of, positions_of, weights
from references.tiers_loop import lowered, positions, rooms, standing


def grades(
    part: Any, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
) -> list[int]:
    """One grade per kept entry."""
    size, itemsize = entries.keys.shape[1], entries.keys.dtype.itemsize
    room = rooms(quota, part.group, [(part.codecs[0], 1.0)], size, itemsize)
    lowered_entries = lowered(plan, entries, positions(entries), room, [part.group])
    found: list[int] = []
    weights_of = iter(scored.storage_statistics.weights.tolist())
    newest = max(
        max(positions_of(entries, head), default=0) for head in range(len(entries.lengths))
    )
    for head, length in enumerate(entries.lengths):
        for row in range(entries.starts[head], entries.starts[head] + length):
            arguments = next(weights_of), scored.storage_statistics.numbers[0]
            is_new = newest - int(entries.positions[row]) < part.window - 1
            found.append(1 if is_new else wanted(part, entries, row, *arguments, length))
    held = standing(plan, entries)
    pairs = zip(plan.kept.tolist(), lowered_entries, strict=True)
    return [found[e] if held[e] == 0 and leaves else held[e] for e, leaves in pairs]


def wanted(part: Any, entries: Entries, row: int, weight: float, norm: float, length: int) -> int:
    """The grade of one entry."""
    value = math.sqrt(12 / length) * part.value_error / max(weight, 1.1754943508222875e-38)
    growth = length**3 / max(length - 1, 1) * part.key_error**2 + 1
    key = math.sqrt(12 / norm * math.log(growth))
    keys, values = bits(part, entries.keys[row], key), bits(part, entries.values[row], value)
    return 1 + 8 * (8 - keys) + 8 - values


def bits(part: Any, vector: Any, deviation: float) -> int:
    numbers = sorted(vector.tolist())
    low = between(numbers, part.outliers / 2 * (len(numbers) - 1))
    high = between(numbers, (1 - part.outliers / 2) * (len(numbers) - 1))
    needed = math.ceil(math.log2((high - low) / (2 * deviation) + 1))
    return min(max(needed, 1), 8)


def between(numbers: list[float], position: float) -> float:
    """The number at a place that need not be whole."""
    first, beyond = int(position), min(int(position) + 1, len(numbers) - 1)
    return numbers[first] + (position - first) * (numbers[beyond] - numbers[first])


def looked_at(part: Any, observation: Observation) -> list[float]:
    """The highest weight that any of the last queries gives each packed entry."""
    found: list[float] = []
    queries = range(
        max(0, observation.queries.shape[1] - part.window), observation.queries.shape[1]
    )
    for head in range(observation.layer.kv_heads):
        indices = positions_of(observation.entries, head)
        best = [0.0] * len(indices)
        for query_head in group_of(observation, head):
            for query in queries:
                visible = [
                    position <= int(observation.query_positions[query]) for position in indices
                ]
                row = weights(observation, query_head, query, visible)
                best = [max(a, b) for a, b in zip(best, row, strict=True)]
        found += best
    return found
