"""The heart of a policy: from what a layer saw to a plan for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from larder.core.errors import BudgetError, ScoreError
from larder.core.observation import Entries, Scored, Seen
from larder.core.plan import Plan
from larder.core.spelling import name_of, spell
from larder.core.types import Packed
from larder.policy.budgets.base import Budget, Calibration
from larder.policy.compensation.base import Compensation
from larder.policy.protect import Protect
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class Planner:
    """What is protected, what scores, how many stay, what becomes of the rest."""

    protect: Protect
    scorer: Scorer
    budget: Budget
    compensation: Compensation

    def quotas(
        self, tokens: int, context: int, layers: tuple[int, ...], facts: Calibration
    ) -> dict[int, int]:
        """Entries per kv head of each managed layer, by layer index.

        Args:
            tokens: the average over layers.
            context: tokens to be read; no layer can fill more.

        Raises:
            BudgetError: what is protected and what the scorer always keeps do not fit together.
        """
        least = self.protect.least(tokens).joined(self.scorer.least())
        if least.tokens > tokens:
            raise BudgetError(
                f"The budget of {tokens} tokens is smaller than the {least.tokens} that "
                f"{spell(self.protect)} and {spell(self.scorer)} always keep ({least.first} at the "
                f"start, {least.last} at the end): raise --budget, or give either of them less."
            )
        if not layers:  # every layer slides its own window
            return {}
        shares = self.budget.layer_tokens(tokens, len(layers), least.tokens, context, facts)
        return dict(zip(layers, shares, strict=True))

    def score(self, seen: Seen) -> Packed:
        """The scorer's float32 score of every entry of a layer.

        Raises:
            ScoreError: it is not one number per entry.
        """
        scores = self.scorer.score(seen)
        wanted, whose = sum(seen.entries.lengths), name_of(type(self.scorer))
        if tuple(scores.shape) != (wanted,):
            raise ScoreError(
                f"{whose} returned scores of shape {tuple(scores.shape)} for layer "
                f"{seen.layer.index}, which holds ({wanted},) entries (T, over all its kv heads): "
                "return one score per entry, head by head."
            )
        if not scores.is_floating_point():
            raise ScoreError(
                f"{whose} returned {scores.dtype} scores for layer {seen.layer.index}: return "
                "float32."
            )
        if bool(scores.isnan().any()):
            raise ScoreError(
                f"{whose} returned {int(scores.isnan().sum())} NaN among {wanted} scores for "
                f"layer {seen.layer.index}, which cannot be ranked: return numbers or infinities."
            )
        return scores.to(torch.float32)

    def judge(self, seen: Seen, scores: Packed, tokens: int) -> Scored:
        """A layer's scores together with what is protected."""
        positions = seen.entries.packed_positions()
        protected = self.protect.mask(positions, seen.length, tokens)
        return Scored(scores, protected, seen.entries.lengths)

    def plan(
        self,
        ready: Mapping[int, Scored],
        quotas: Mapping[int, int],
        entries: Callable[[int], Entries],
    ) -> dict[int, Plan]:
        """Plans for the layers that can be decided now; the others wait for more layers.

        Args:
            ready: judged layers that have no plan yet, by layer index.
            entries: what a layer holds.
        """
        chosen = self.budget.choose(ready, quotas)
        return {index: self.compensation.settle(p, entries(index)) for index, p in chosen.items()}
