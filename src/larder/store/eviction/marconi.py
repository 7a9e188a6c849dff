"""Recency plus computation saved per byte.

Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs" (2024), arXiv:2411.19379, section
4.2:

    worth = scaled(1 / idle seconds) + alpha * scaled(seconds / bytes)

with both terms scaled to [0, 1] over all candidates. Operations grow quadratically with length and
bytes do not, so the second term favors long sessions. The paper finds alpha by replaying the first
part of a trace, and so does `benchmarks/store_eviction.py`; the default was nowhere much worse than
`lru` there.

What differs: the saving is the time to compute the candidate itself; the released code counts a
parent's feed-forward layers as attention, and evicts inner nodes of the tree only where layers have
a state of fixed size. Idle time is at least a second, as two uses at one instant would be
infinitely recent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from larder.core.errors import BadParameter
from larder.store.eviction.base import CandidateColumns, EvictionPolicy, FloatColumn

MIN_IDLE_SECONDS = 1.0  # seconds


@dataclass(frozen=True)
class Marconi(EvictionPolicy):
    """Recency and operations per byte.

    Args:
        alpha: weight of operations per byte; at 0 only recency counts.
    """

    alpha: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha >= 0:
            raise BadParameter(f"marconi.alpha must be 0 or more, got {self.alpha}.")

    def worth(self, held: CandidateColumns, now: float) -> FloatColumn:
        recent = 1 / np.maximum(now - held.last_used, MIN_IDLE_SECONDS)
        return _scaled(recent) + self.alpha * _scaled(held.seconds / held.bytes)


def _scaled(values: FloatColumn) -> FloatColumn:
    """Values scaled to [0, 1]; all 0 if they are equal."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


Part = Marconi
