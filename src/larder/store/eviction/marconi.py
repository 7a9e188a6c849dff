"""Recency plus computation saved per byte.

Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs" (2024), arXiv:2411.19379, section
4.2:

    worth = scaled(1 / idle seconds) + alpha * scaled(seconds / bytes)

with both terms scaled to [0, 1] over all candidates. Operations grow quadratically with length and
bytes do not, so the second term favors long sessions. A server finds alpha as the released code
does: it waits for five times as many requests as preceded the first eviction, and takes the value
from 0 to 2 that would have saved most in them (`variants`); until then it is the default, which was
nowhere much worse than `lru` in `benchmarks/store_eviction.py`.

What differs: the saving is the cost of the candidate itself; the released code counts a parent's
feed-forward layers as attention, and evicts inner nodes of the tree only where layers have a state
of fixed size. Sessions are replayed as whole states, without the prefixes that they share. Idle
time is at least a second, as two uses at one instant would be infinitely recent. Which states to
admit is no question here: a recurrent state is saved at the end of a turn alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from larder.core.arguments import require
from larder.store.eviction.base import CandidateColumns, EvictionPolicy, FloatColumn

MIN_IDLE_SECONDS = 1.0
ALPHAS = tuple(number / 10 for number in range(21))  # that a server chooses from


@dataclass(frozen=True)
class Marconi(EvictionPolicy):
    """Recency and operations per byte.

    Args:
        alpha: weight of operations per byte; at 0 only recency counts.
    """

    counts_operations: ClassVar[bool] = True

    alpha: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha >= 0, "marconi.alpha", "0 or more", self.alpha)

    def variants(self) -> Sequence[Marconi]:
        return [replace(self, alpha=alpha) for alpha in ALPHAS]

    def worth(self, candidates: CandidateColumns, now: float) -> FloatColumn:
        recent = 1 / np.maximum(now - candidates.last_used, MIN_IDLE_SECONDS)
        return _scaled(recent) + self.alpha * _scaled(candidates.seconds / candidates.bytes)


def _scaled(values: FloatColumn) -> FloatColumn:
    """Values scaled to [0, 1]; all 0 if they are equal."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


Part = Marconi
