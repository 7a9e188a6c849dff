"""`infinipot`: two lists, merged so that each has its share of any number of places."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, weights

SMALL = {"novel": 0.4}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    start, count = observation.entries.starts[head], observation.entries.lengths[head]
    novelty = [
        float(observation.entries.columns["surprise"][start + index]) for index in range(count)
    ]
    looked = [0.0] * count
    if count:
        for query_head in group_of(observation, head):
            for query in range(observation.queries.shape[1]):
                row = weights(observation, query_head, query, [True] * count)
                looked = [a + b for a, b in zip(looked, row, strict=True)]
    new, wanted = listed(novelty), listed(looked)
    return [
        max(part.novel / (1 + new.index(i)), (1 - part.novel) / (1 + wanted.index(i)))
        for i in range(count)
    ]


def listed(values: list[float]) -> list[int]:
    """Entries from the highest value on, the earlier of equals first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def chosen(novelty: list[float], looked: list[float], novel: float, room: int) -> set[int]:
    """The `room` entries that stay, found by going down both lists a little at a time."""
    new, wanted = listed(novelty), listed(looked)
    kept: set[int] = set()
    steps = 0
    while len(kept) < room:
        steps += 1
        share = steps / 1000
        grown = set(new[: int(novel * share)]) | set(wanted[: int((1 - novel) * share)])
        assert len(grown) <= room or len(grown - kept) > 1, "a step too far"
        kept = grown
    return kept
