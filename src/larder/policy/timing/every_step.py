"""Eviction at every decode step: memory is constant during generation.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(2023), arXiv:2306.14048, section 4.2, and D2O (arXiv:2406.13035), which folds what goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.policy.timing.base import Timing


@dataclass(frozen=True)
class EveryStep(Timing):
    """Plan after every token."""

    def excess(self) -> int | None:
        return 0


Part = EveryStep
