"""Softmax of attention with a softcap on logits and a sink, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

NO_SINK = -math.inf


def capped(logit: float, softcap: float | None) -> float:
    return logit if softcap is None else softcap * math.tanh(logit / softcap)


def sink_of(sinks: Sequence[float], query_head: int) -> float:
    """Sink of a query head; minus infinity without sinks."""
    return sinks[query_head] if len(sinks) else NO_SINK


def shares(logits: Sequence[float], sink: float = NO_SINK) -> list[float]:
    """Weights of entries; with a sink they sum to less than 1."""
    peak = max([*logits, sink])
    raised = [math.exp(logit - peak) for logit in logits]
    total = sum(raised) + math.exp(sink - peak)
    return [number / total for number in raised]
