"""`keydiff`: minus the cosine between each key and the mean of the unit keys."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of


def unit(vector: list[float]) -> list[float]:
    norm = math.sqrt(sum(x * x for x in vector))
    return [x / norm for x in vector]


def mean(vectors: list[list[float]]) -> list[float]:
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def scores(part: Any, observation: Observation) -> list[list[float]]:
    heads = []
    for head in heads_of(observation):
        start, length = observation.entries.starts[head], observation.entries.lengths[head]
        heads.append([unit(observation.entries.keys[start + s].tolist()) for s in range(length)])
    together = [key for head in heads for key in head]
    out = []
    for keys in heads:
        if not keys:
            out.append([])
            continue
        anchor = unit(mean(together if part.variant.value == "code" else keys))
        out.append([-sum(a * b for a, b in zip(key, anchor, strict=True)) for key in keys])
    return out
