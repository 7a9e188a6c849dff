"""`lookahead`: summed votes of drafted queries, smoothed by a running maximum; and the drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, weights

SMALL = {"tokens": 3, "kernel": 3}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    count, queries = observation.entries.lengths[head], observation.queries.shape[1]
    votes = [0.0] * count
    for query_head in group_of(observation, head):
        for query in range(max(0, queries - part.tokens), queries):
            if count:
                row = weights(observation, query_head, query, [True] * count)
                votes = [a + b for a, b in zip(votes, row, strict=True)]
    half = part.kernel // 2
    return [max(votes[max(0, i - half) : i + half + 1]) for i in range(count)]


def draft(following: Callable[[list[int]], list[float]], tokens: int) -> list[int]:
    """Greedy continuation.

    Args:
        following: logits of the token behind the context and what was said of the draft so far.
    """
    drafted: list[int] = []
    for _ in range(tokens):
        logits = following(drafted)
        drafted.append(logits.index(max(logits)))
    return drafted
