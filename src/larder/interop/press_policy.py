"""Policy by a press of NVIDIA/kvpress: it chooses entries of a prompt; generated tokens stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from larder.core.errors import UsageError
from larder.core.observation import Calibration, LayerScores, Observation
from larder.core.plan import Plan
from larder.core.types import Packed
from larder.interop.attachment import Attachment
from larder.interop.press_adapter import PressAdapter
from larder.policy.budgets.base import Budget
from larder.policy.scorers.base import Scorer
from larder.session.default_policy import TextKind, default_policy
from larder.session.policy import Policy
from larder.session.prefill import SizeOptions

OTHER_PARTS = "whole() > protect(sinks=0, recent=0) > sinks_and_window() > uniform()"


def chosen_policy(
    attachment: Attachment, policy: str | Policy | None, sizes: SizeOptions, kvpress: Any
) -> str | Policy:
    """Policy that was given, else that of a press if there is one, else the default of prompts.

    Raises:
        UsageError: the press cannot be taken over, or was given beside a policy or a size.
    """
    if kvpress is None:
        return default_policy(TextKind.PROMPT) if policy is None else policy
    if policy is not None or sizes != SizeOptions():
        raise UsageError(
            "kvpress= was given together with a policy, a budget or a block, but a press chooses "
            "by its own compression ratio from a whole prompt: leave the others out."
        )
    press = PressAdapter.of(kvpress, attachment.module, attachment.decoder)
    others = Policy.parse(OTHER_PARTS)
    return replace(others, scorer=PressScorer(press), budget=PressBudget(kept=1.0))


@dataclass(frozen=True)
class PressBudget(Budget):
    """Entries with a score above 0, however many each head has.

    The press sets the size, so that `tokens` and `kept` are upper bounds.
    """

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        """No entries without a plan: the press is asked about every prompt."""
        return (0,) * layers

    def choose(
        self, ready: Mapping[int, LayerScores], quotas: Mapping[int, int]
    ) -> dict[int, Plan]:
        return {
            index: Plan.from_mask(scored.scores > 0, scored.lengths)
            for index, scored in ready.items()
        }


@dataclass(frozen=True, eq=False)
class PressScorer(Scorer):
    """Choice of a press, for `PressBudget`.

    A press is asked about a first text, which it sees whole, as under kvpress. All entries of later
    texts score 1.
    """

    press: PressAdapter

    def required_providers(self) -> frozenset[str]:
        return frozenset({"states"})

    def observes_whole_text(self) -> bool:
        return True

    def score(self, observation: Observation) -> Packed:
        entries, heads = observation.entries, range(observation.layer.kv_heads)
        if set(entries.lengths) != {observation.queries.shape[1]}:
            return torch.ones(sum(entries.lengths), device=entries.keys.device)
        keys = torch.stack([entries.head_keys(head) for head in heads])
        values = torch.stack([entries.head_values(head) for head in heads])
        kept = self.press.kept_mask(
            observation.layer.index, observation.inputs["states"], keys, values
        )
        return kept.float().flatten()
