"""Scorer by attention from the newest token (TOVA).

Oren et al., "Transformers are Multi-State RNNs" (2024), arXiv:2401.06104 (TOVA): the weights of the
last query, averaged over all heads of the layer (`layer_mean`), so that all heads keep the same
tokens under a budget per head. The newest token competes with the others, as in the paper.

With `group_mean` each kv head is judged by the query heads that share it. So does the released code
of SCOPE (arXiv:2412.13649) choose among generated tokens: see `split`.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Observation
from larder.core.plan import StepScore, StepScoring
from larder.policy.attention_reduction import AttentionReduction, ObservationWindow
from larder.policy.scorers.base import AttentionScorer


@dataclass(frozen=True)
class LastQuery(AttentionScorer):
    """Softmax weight from the newest token alone."""

    def default_reduction(self) -> tuple[str, str]:
        return ("sum", "layer_mean")

    def observation_window(self, observation: Observation) -> ObservationWindow:
        return ObservationWindow(
            observation.queries[:, -1:], observation.entries, observation.query_positions[-1:]
        )

    def step_scoring(self, reduction: AttentionReduction) -> StepScoring | None:
        is_published = reduction == self._default_reduction
        return StepScoring(StepScore.LAYER_MEAN) if is_published else None


Part = LastQuery
