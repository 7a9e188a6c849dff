"""`compactor`: two scores in standard deviations, added, without the ends of the text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from larder.core import Entries, Observation
from larder.policy import CompactorEnds, Scaling
from references import leverage, non_causal
from references.attention_loop import heads_of, positions_of

SMALL = {"sketch": 5, "chunk": 3, "sinks": 1, "recent": 1, "tokens": 4}


@dataclass
class CompactorParameters:
    """Parameters of the two scores."""

    sketch: int
    chunk: int
    ridge: float = 0.001
    seed: int = 0
    scaling: Scaling = Scaling.NONE
    first: int = 0


def scores(part: Any, observation: Observation) -> list[list[float]]:
    positions = [positions_of(observation.entries, head) for head in heads_of(observation)]
    stop = observation.length - part.recent
    counted = [[part.sinks <= p < stop for p in own] for own in positions]
    if part.ends is CompactorEnds.LEFT_OUT:
        inner = iter(between(part, observation, counted))
        return [[next(inner) if count else math.inf for count in own] for own in counted]
    return blended(part, observation, counted, CompactorParameters(part.sketch, part.chunk))


def between(part: Any, observation: Observation, counted: list[list[bool]]) -> list[float]:
    """Scores of the counted entries, as if there were no others."""
    kept = [
        start + i
        for start, own in zip(observation.entries.starts, counted, strict=True)
        for i, count in enumerate(own)
        if count
    ]
    if not kept:
        return []
    lengths = [sum(own) for own in counted]
    entries = Entries(
        observation.entries.keys[kept],
        observation.entries.values[kept],
        observation.entries.positions[kept],
        tuple(sum(lengths[:head]) for head in range(len(lengths))),
        tuple(lengths),
    )
    asked = [
        q
        for q, at in enumerate(observation.query_positions.tolist())
        if part.sinks <= at < observation.length - part.recent
    ]
    inner = replace(
        observation,
        entries=entries,
        queries=observation.queries[:, asked],
        query_positions=observation.query_positions[asked],
        keys=observation.keys[:, asked],
    )
    parameters = CompactorParameters(part.sketch, part.chunk, first=part.sinks)
    all_counted = [[True] * length for length in lengths]
    return [x for row in blended(part, inner, all_counted, parameters) for x in row]


def blended(
    part: Any, observation: Observation, counted: list[list[bool]], both: CompactorParameters
) -> list[list[float]]:
    one = standard(leverage.scores(both, observation), counted)
    other = standard(non_causal.scores(both, observation), counted)
    weight = part.blend
    if weight is None:
        weight = max(0.0, 1 - part.tokens / observation.length)
    return [
        [weight * a + b if count else math.inf for a, b, count in zip(*rows, strict=True)]
        for rows in zip(one, other, counted, strict=True)
    ]


def standard(rows: list[list[float]], counted: list[list[bool]]) -> list[list[float]]:
    own = [
        x
        for row, marks in zip(rows, counted, strict=True)
        for x, mark in zip(row, marks, strict=True)
        if mark
    ]
    if not own:
        return rows
    mean = sum(own) / len(own)
    spread = sum((x - mean) ** 2 for x in own) / (len(own) - 1) if len(own) > 1 else 0.0
    least = max(0.05 * abs(mean), 1e-20)
    return [[(x - mean) / max(math.sqrt(spread), least) for x in row] for row in rows]
