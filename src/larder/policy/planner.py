"""The heart of a policy: from what a layer saw to a plan for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from larder.core.observation import Scored, Seen
from larder.core.plan import Plan
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
            BudgetError: the protected entries do not fit.
        """
        least = self.protect.least(tokens)
        if not layers:  # every layer slides its own window
            return {}
        shares = self.budget.layer_tokens(tokens, len(layers), least, context, facts)
        return dict(zip(layers, shares, strict=True))

    def judge(self, seen: Seen, scores: Packed, tokens: int) -> Scored:
        """A layer's scores together with what is protected."""
        positions = seen.entries.packed_positions()
        protected = self.protect.mask(positions, seen.length, tokens)
        return Scored(scores, protected, seen.entries.lengths)

    def plan(
        self, ready: Mapping[int, Scored], quotas: Mapping[int, int], seen: Mapping[int, Seen]
    ) -> dict[int, Plan]:
        """Plans for the layers that can be decided now; the others wait for more layers."""
        chosen = self.budget.choose(ready, quotas)
        return {index: self.compensation.settle(p, seen[index]) for index, p in chosen.items()}
