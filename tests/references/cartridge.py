"""Cartridge: attention to slots and to a conversation, and the loss, by loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]


def attended(
    query: Vector,
    slots: Sequence[tuple[Vector, Vector]],
    tokens: Sequence[tuple[Vector, Vector]],
    scaling: float,
    softcap: float | None = None,
) -> list[float]:
    """Output of a token over all slots and over the tokens of its conversation up to itself."""
    seen = [*slots, *tokens]
    logits = [scaling * sum(q * k for q, k in zip(query, key, strict=True)) for key, _ in seen]
    if softcap is not None:
        logits = [softcap * math.tanh(logit / softcap) for logit in logits]
    peak = max(logits)
    weights = [math.exp(logit - peak) for logit in logits]
    return [
        sum(w * value[d] for w, (_, value) in zip(weights, seen, strict=True)) / sum(weights)
        for d in range(len(seen[0][1]))
    ]


def loss(teacher: Sequence[dict[int, float]], student: Sequence[Vector]) -> float:
    """Mean cross-entropy of logits against probabilities of some tokens.

    Args:
        teacher: probability by token id, of each row.
        student: logits of each row.
    """
    total = 0.0
    for known, logits in zip(teacher, student, strict=True):
        norm = math.log(sum(math.exp(logit) for logit in logits))
        total -= sum(share * (logits[token] - norm) for token, share in known.items())
    return total / len(teacher)
