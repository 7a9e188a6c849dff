"""`non_causal`: weights of a chunk's queries over all keys of the chunk, one by one."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, positions_of
from references.lloyd import dot
from references.ops.softmax import capped
from references.recalling import softmax

SMALL = {"chunk": 3, "first": 1}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    positions, start = positions_of(observation.entries, head), observation.entries.starts[head]
    sums = [0.0] * len(positions)
    for h in group_of(observation, head):
        for q, at in enumerate(observation.query_positions.tolist()):
            own = (at - part.first) // part.chunk
            members = [s for s, p in enumerate(positions) if (p - part.first) // part.chunk == own]
            query = observation.queries[h, q].tolist()
            products = [dot(query, observation.entries.keys[start + s].tolist()) for s in members]
            scaling = observation.layer.scaling if part.scaling.value == "model" else 1.0
            logits = [capped(scaling * product, observation.layer.softcap) for product in products]
            for s, weight in zip(members, softmax(logits), strict=True):
                sums[s] += weight / len(group_of(observation, head))
    values = observation.entries.values[start : start + len(positions)].tolist()
    weighed = [x * math.sqrt(dot(v, v)) for x, v in zip(sums, values, strict=True)]
    padded = [0.0, *weighed, 0.0]
    return [sum(padded[s : s + 3]) / 3 for s in range(len(weighed))]
