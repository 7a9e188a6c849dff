"""`lookahead_kv`: the mean weight that the tokens of the pass give an entry; a learned pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from larder.core import Observation
from references.attention_loop import group_of, heads_of, plain_weights


def scores(part: Any, observation: Observation) -> list[list[float]]:
    del part
    found, queries = [], observation.queries.shape[1]
    for head in heads_of(observation):
        shown, own = [True] * observation.entries.lengths[head], list(group_of(observation, head))
        sums = [0.0] * len(shown)
        for query_head in own:
            for query in range(queries):
                row = plain_weights(observation, query_head, query, shown)
                sums = [a + b for a, b in zip(sums, row, strict=True)]
        found.append([total / (len(own) * queries) for total in sums])
    return found


def updated(weight: Tensor, down: Tensor, up: Tensor, alpha: int = 32) -> Tensor:
    """Weights of a linear layer with the update of rank len(down)."""
    out = weight.clone()
    for row in range(len(out)):
        for one in range(len(down)):
            out[row] += alpha / len(down) * up[row, one] * down[one]
    return out
