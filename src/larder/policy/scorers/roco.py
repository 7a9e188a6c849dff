"""Scorer by mean attention, after the entries of the highest variance (RoCo).

Ren and Zhu, "On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model
Inference" (2024), arXiv:2402.06262 (RoCo). The mean of the weights that an entry got, not their
sum, so that age is no merit; the entries whose weights vary most are out of reach, because a low
mean says little of them. As in the released EasyKV, 0.3 are spared; that code takes this share of
the budget, and counts its 10 latest tokens among them, where here it is a share of the entries at
hand, and the latest tokens are for `protect`.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.plan import StepScore, StepScoring
from larder.core.types import Packed
from larder.ops.moments import variance_boosted_means
from larder.policy.attention_reduction import AttentionReduction
from larder.policy.scorers.base import Scorer
from larder.policy.tallies.moments import Moments


@dataclass(frozen=True)
class RoCo(Scorer):
    """The mean weight, plus 1 for those that vary most.

    Args:
        spared: share of a head's entries, in [0, 1], that stand above the others because their
            weights have the highest standard deviation. Among themselves they go by the mean.
    """

    spared: float = 0.3
    tallies = frozenset({"moments"})

    def __post_init__(self) -> None:
        require(0 <= self.spared <= 1, "roco.spared", "a fraction in [0, 1]", self.spared)

    def score(self, observation: Observation) -> Packed:
        entries = observation.entries
        count, mean, spread = (entries.columns[name] for name in Moments.columns)
        return variance_boosted_means(count, mean, spread, *entries.layout, self.spared)

    def step_scoring(self, reduction: AttentionReduction) -> StepScoring:
        return StepScoring(StepScore.RAISED_MEAN, spared=self.spared)


Part = RoCo
