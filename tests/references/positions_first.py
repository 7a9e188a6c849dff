"""`positions_first`: the mean weight that pseudo queries of the group give an entry."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, weights

SMALL = {"tokens": 3}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    out: list[list[float]] = []
    for head in heads_of(observation):
        count = observation.entries.lengths[head]
        asked = range(observation.queries.shape[1])[-part.tokens :]
        sums = [0.0] * count
        for query_head in group_of(observation, head):
            for query in asked if count else ():
                row = weights(observation, query_head, query, [True] * count)
                sums = [a + b for a, b in zip(sums, row, strict=True)]
        votes = len(asked) * len(group_of(observation, head))
        out.append([value / votes for value in sums])
    return out


def text(content: str, tokens: int, block: list[int], request: list[int]) -> list[int]:
    """Pseudo tokens."""
    if content == "fixed":
        endless = request * tokens
        return endless[:tokens]
    if content == "latest":
        return block[max(0, len(block) - tokens) :]
    if len(block) <= tokens:
        return block
    first = tokens // 2
    return block[:first] + block[len(block) - (tokens - first) :]
