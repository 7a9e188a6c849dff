"""Scorer by accumulated attention: the sum of weights from all queries so far (H2O).

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(2023), arXiv:2306.14048, section 4. The sum goes on while generating, so it favors entries that
have been there for long: protect a window of recent tokens, in the paper half of the budget.
Query heads that share a kv head add up; the paper has one kv head per query head.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Observation
from larder.core.plan import StepScore, StepScoring
from larder.core.types import Packed
from larder.policy.attention_reduction import AttentionReduction
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class ColumnMass(Scorer):
    """Accumulated attention: the heavy hitters stay."""

    tallies = frozenset({"mass"})

    def score(self, observation: Observation) -> Packed:
        return observation.entries.column("mass")

    def step_scoring(self, reduction: AttentionReduction) -> StepScoring:
        return StepScoring(StepScore.MASS)


Part = ColumnMass
