"""Budget of a policy by a press of NVIDIA/kvpress: the entries that the press keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from larder.core.observation import Calibration, LayerScores
from larder.core.plan import Plan
from larder.policy.budgets.base import Budget


@dataclass(frozen=True)
class PressBudget(Budget):
    """Entries with a score above 0, however many each head has.

    The press sets the size, so that `tokens` and `kept` are upper bounds.
    """

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, facts: Calibration
    ) -> tuple[int, ...]:
        """No entries without a plan: the press is asked about every prompt."""
        del tokens, least, most, facts
        return (0,) * layers

    def choose(
        self, ready: Mapping[int, LayerScores], quotas: Mapping[int, int]
    ) -> dict[int, Plan]:
        del quotas
        return {
            index: Plan.from_mask(scored.scores > 0, scored.lengths)
            for index, scored in ready.items()
        }
