"""`compactor`: two scores in standard deviations, added, without the ends of the text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from larder.core import Observation
from larder.policy import Scaling
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


def scores(part: Any, observation: Observation) -> list[list[float]]:
    both = CompactorParameters(part.sketch, part.chunk)
    positions = [positions_of(observation.entries, head) for head in heads_of(observation)]
    counted = [
        [part.sinks <= p < observation.length - part.recent for p in own] for own in positions
    ]
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
