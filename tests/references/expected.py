"""`expected`: the closed form of expected attention, with whole rotation matrices."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, positions_of
from references.ops.softmax import capped, sink_of
from references.ops.softmax import shares as softmax_shares

SMALL = {"future": 5, "sinks": 2, "epsilon": 0.03}  # parameters for small layers

Matrix = list[list[float]]


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    entries, positions = observation.entries, positions_of(observation.entries, head)
    start = entries.starts[head]
    judged = [s for s, index in enumerate(positions) if index >= part.sinks]
    shares = [0.0] * len(positions)
    for query_head in group_of(observation, head):
        logits = expected_logits(part, observation, head, query_head, [start + s for s in judged])
        capped_logits = [capped(logit, observation.layer.softcap) for logit in logits]
        weights = softmax_shares(capped_logits, sink_of(observation.layer.sinks, query_head))
        for s, weight in zip(judged, weights, strict=True):
            shares[s] += weight / len(group_of(observation, head))
    out = []
    for s, index in enumerate(positions):
        length = math.sqrt(sum(x * x for x in entries.values[start + s].tolist()))
        out.append(math.inf if index < part.sinks else (shares[s] + part.epsilon) * length)
    return out


def expected_logits(
    part: Any, observation: Observation, head: int, query_head: int, rows: list[int]
) -> list[float]:
    at = observation.effective_rope_positions[head].tolist()
    true = observation.query_positions.tolist()
    counted = [q for q, index in enumerate(true) if index >= part.sinks] or list(range(len(true)))
    queries = [
        times(rotation(observation, -at[q]), observation.queries[query_head, q].tolist())
        for q in counted
    ]
    size = range(observation.layer.head_dim)
    mean = [sum(query[d] for query in queries) / len(queries) for d in size]
    covariance = [
        [sum((q[a] - mean[a]) * (q[b] - mean[b]) for q in queries) / len(queries) for b in size]
        for a in size
    ]
    turns = [rotation(observation, at[-1] + ahead) for ahead in range(1, part.future + 1)]
    turn = [[sum(one[a][b] for one in turns) / len(turns) for b in size] for a in size]
    turned_mean = times(turn, mean)
    flipped = [[turn[b][a] for b in size] for a in size]
    spread = product(product(turn, covariance), flipped)
    out = []
    for row in rows:
        key = observation.entries.keys[row].tolist()
        straight = dot(key, turned_mean) * observation.layer.scaling
        out.append(straight + dot(key, times(spread, key)) * observation.layer.scaling**2 / 2)
    return out


def rotation(observation: Observation, position: int) -> Matrix:
    """The matrix that turns a vector to a position."""
    assert observation.layer.radians is not None
    size, half = observation.layer.head_dim, len(observation.layer.radians)
    out = [[float(a == b) for b in range(size)] for a in range(size)]
    for pair, radians in enumerate(observation.layer.radians):
        cosine, sine = math.cos(position * radians), math.sin(position * radians)
        out[pair][pair] = out[pair + half][pair + half] = cosine
        out[pair][pair + half], out[pair + half][pair] = -sine, sine
    return out


def times(matrix: Matrix, vector: list[float]) -> list[float]:
    return [dot(row, vector) for row in matrix]


def product(left: Matrix, right: Matrix) -> Matrix:
    columns = [list(column) for column in zip(*right, strict=True)]
    return [[dot(row, column) for column in columns] for row in left]


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
