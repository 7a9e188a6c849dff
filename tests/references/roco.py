"""`roco`: the mean weight; those that vary most stand 1 above the others."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of

SMALL = {"spared": 0.4}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    entries, start = observation.entries, observation.entries.starts[head]
    held = range(entries.lengths[head])
    count, mean, spread = (
        [float(entries.columns[name][start + s]) for s in held]
        for name in ("moment_count", "moment_mean", "moment_spread")
    )
    most_uneven_first = sorted(held, key=lambda s: (-spread[s] / count[s], s))
    spared = most_uneven_first[: int(part.spared * len(held))]
    return [mean[s] + (1.0 if s in spared else 0.0) for s in held]
