"""Attention of one query to contexts in a branch of their own, one entry at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from references.cache.loop import Entry


def branch(query: Tensor, entries: Sequence[Entry], scaling: float) -> tuple[list[float], float]:
    """Output of a softmax over entries, and its log-sum-exp."""
    logits = [
        scaling * sum(q * k for q, k in zip(query.tolist(), entry.key.tolist(), strict=True))
        for entry in entries
    ]
    total = sum(math.exp(logit) for logit in logits)
    out = [0.0] * len(query)
    for logit, entry in zip(logits, entries, strict=True):
        for d, number in enumerate(entry.value.tolist()):
            out[d] += math.exp(logit) / total * number
    return out, math.log(total)


def context_weight(context: float, rest: float, temperature: float, scale: float) -> float:
    """Weight of the contexts, from the log-sum-exp of both branches."""
    one, other = math.exp(scale * temperature * context), math.exp(rest)
    return one / (one + other)


def two_branches(
    query: Tensor,
    contexts: Sequence[Entry],
    rest: Sequence[Entry],
    scaling: float,
    temperature: float,
    scale: float,
) -> list[float]:
    """Output of one query head."""
    found, context = branch(query, contexts, scaling / temperature)
    other, own = branch(query, rest, scaling)
    weight = context_weight(context, own, temperature, scale)
    return [weight * a + (1 - weight) * b for a, b in zip(found, other, strict=True)]
