"""Recency plus computation saved per byte.

Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs" (2024), arXiv:2411.19379, section
4.2:

    worth = scaled(1 / idle seconds) + alpha * scaled(seconds / bytes)

with both terms scaled to [0, 1] over what the tier holds. Operations are quadratic in the length
and bytes are not, so the second term is for long sessions. The paper finds alpha by replaying the
first part of a trace, and so does `benchmarks/store_eviction.py`; the default is one that lost
nowhere much to `lru` there.

What differs: what is saved is what the candidate itself takes to compute, in time; the released
code takes a parent's feed-forward layers for attention, and only where layers have a state of fixed
size can a node in the middle of the tree go. Idle is at least a second, as two uses at one
instant would be infinitely recent.
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
        alpha: the weight of the second; at 0 only recency counts.
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
