"""`morph`: what the latest queries give to older entries, among these alone; the others stay."""

from __future__ import annotations

import math
from typing import Any

from larder.core import LOG_COUNT, Observation
from references.attention_loop import group_of, heads_of, positions_of
from references.ops.softmax import capped, sink_of

SMALL = {"window": 3}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    newest = 1 if observation.phase.value == "generating" else 0
    start = observation.length - part.window - newest
    positions = positions_of(observation.entries, head)
    older = [s for s, index in enumerate(positions) if index < start]
    rows = []
    for query in judges(part, observation, observation.length - newest):
        heads = [
            among(observation, query_head, query[query_head], older)
            for query_head in group_of(observation, head)
        ]
        rows.append([max(column) for column in zip(*heads, strict=True)])
    fuse = sum if part.fusion.value == "sum" else max
    fused = [fuse(column) for column in zip(*rows, strict=True)] or [0.0] * len(older)
    return fused + [math.inf] * (len(positions) - len(older))


def judges(part: Any, observation: Observation, stop: int) -> list[Any]:
    """The vectors of all query heads, for each of the last queries at positions before `stop`."""
    result = (
        []
        if observation.latest is None
        else [(observation.latest.queries, observation.latest.positions)]
    )
    result.append((observation.queries, observation.query_positions))
    every = [
        queries[:, q].double()
        for queries, positions in result
        for q in range(len(positions))
        if int(positions[q]) < stop
    ]
    return every[-part.window :]


def among(observation: Observation, query_head: int, query: Any, older: list[int]) -> list[float]:
    """Softmax weights over the older entries alone, one of n tokens counting n times."""
    head = query_head // (observation.layer.query_heads // observation.layer.kv_heads)
    entries, start = observation.entries, observation.entries.starts[head]
    counts = entries.columns.get(LOG_COUNT)
    parts = []
    for s in older:
        logit = float(query @ entries.keys[start + s].double()) * observation.layer.scaling
        logit = capped(logit, observation.layer.softcap)
        parts.append(math.exp(logit + (0.0 if counts is None else float(counts[start + s]))))
    total = sum(parts) + math.exp(sink_of(observation.layer.sinks, query_head))
    return [part / total for part in parts]
