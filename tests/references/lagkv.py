"""`lagkv`: spread over channels, scaled by the lowest and highest of the next partition."""

from __future__ import annotations

import math
import statistics
from typing import Any

from torch import Tensor

from larder.core import Observation
from references.attention_loop import heads_of

SMALL = {"sinks": 1, "lag": 2}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    entries, start, held = (
        observation.entries,
        observation.entries.starts[head],
        observation.entries.lengths[head],
    )
    out = [1 + s / held for s in range(held)]
    out[: part.sinks] = [math.inf] * min(part.sinks, held)
    room = held - part.sinks
    lag = part.lag or max(2, min(1024, room // 8, max(32, room // 32)))
    first = part.sinks
    while first + 2 * lag <= held:
        own = [start + s for s in range(first, first + lag)]
        after = [row + lag for row in own]
        by_key = shares([uneven(entries.keys, row, after) for row in own])
        by_value = shares([uneven(entries.values, row, after) for row in own])
        both = [(k + v) / 2 for k, v in zip(by_key, by_value, strict=True)]
        if part.within.value == "partition":
            both = [(sum(other < mine for other in both) + mine) / lag for mine in both]
        out[first : first + lag] = both
        first += lag
    return out


def uneven(stored: Tensor, row: int, after: list[int]) -> float:
    """Standard deviation over channels of one entry, each scaled to the range of later ones."""
    scaled = []
    for channel in range(stored.shape[1]):
        later = [float(stored[other, channel]) for other in after]
        width = max(later) - min(later)
        scaled.append((float(stored[row, channel]) - min(later)) / (width or 1.0))
    return statistics.stdev(scaled)


def shares(numbers: list[float]) -> list[float]:
    total = sum(math.exp(number) for number in numbers)
    return [math.exp(number) / total for number in numbers]
