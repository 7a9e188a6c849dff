"""`morph`: what the latest queries give to older entries, among these alone; the others stay."""

from __future__ import annotations

import math
from typing import Any

from larder.core import LOG_COUNT, Observation
from references.attention_loop import group_of, heads_of, positions_of
from references.ops.softmax import capped, sink_of

SMALL = {"window": 3}  # parameters for small layers


def scores(part: Any, seen: Observation) -> list[list[float]]:
    return [one_head(part, seen, head) for head in heads_of(seen)]


def one_head(part: Any, seen: Observation, head: int) -> list[float]:
    newest = 1 if seen.stage.value == "generating" else 0
    start = seen.length - part.window - newest
    positions = positions_of(seen.entries, head)
    older = [s for s, place in enumerate(positions) if place < start]
    rows = []
    for query in judges(part, seen, seen.length - newest):
        heads = [
            among(seen, query_head, query[query_head], older) for query_head in group_of(seen, head)
        ]
        rows.append([max(column) for column in zip(*heads, strict=True)])
    fuse = sum if part.fusion.value == "sum" else max
    fused = [fuse(column) for column in zip(*rows, strict=True)] or [0.0] * len(older)
    return fused + [math.inf] * (len(positions) - len(older))


def judges(part: Any, seen: Observation, stop: int) -> list[Any]:
    """The vectors of all query heads, for each of the last queries at positions before `stop`."""
    told = [] if seen.latest is None else [(seen.latest.queries, seen.latest.positions)]
    told.append((seen.queries, seen.query_positions))
    every = [
        queries[:, q].double()
        for queries, places in told
        for q in range(len(places))
        if int(places[q]) < stop
    ]
    return every[-part.window :]


def among(seen: Observation, query_head: int, query: Any, older: list[int]) -> list[float]:
    """Softmax weights over the older entries alone, one of n tokens counting n times."""
    head = query_head // (seen.layer.query_heads // seen.layer.kv_heads)
    entries, start = seen.entries, seen.entries.starts[head]
    counts = entries.columns.get(LOG_COUNT)
    parts = []
    for s in older:
        logit = float(query @ entries.keys[start + s].double()) * seen.layer.scaling
        logit = capped(logit, seen.layer.softcap)
        parts.append(math.exp(logit + (0.0 if counts is None else float(counts[start + s]))))
    total = sum(parts) + math.exp(sink_of(seen.layer.sinks, query_head))
    return [part / total for part in parts]
