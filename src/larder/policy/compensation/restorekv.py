"""Entries of learned tokens that stand for what is rejected (RestoreKV).

Baek, Shin, Kong, "RestoreKV: Recovering Full-Cache Behavior Under Aggressive Query-Agnostic KV
Cache Eviction" (2026), arXiv:2608.01247. Before anything is evicted, 8 learned tokens (provider
`restorekv`, trained by `larder train restorekv`) are read behind the full cache, with low-rank
updates of all linear layers in this pass alone. Their keys and values are added to what a scorer
keeps, in every layer and kv head, and take their entries from the budget; scores and the cut are
those of the policy. Nothing is added where nothing is rejected.

What is known of it is the abstract and the released inference code (NVIDIA's kvpress 0.5.5), which
the pass, the sizes and the budget follow. What differs: there the learned tokens are tokens of the
text, and what follows stands behind them; here they have the positions of the latest tokens, as far
from what follows as there, and the text keeps its length. Read again behind later turns, they are
entries like others, which a later plan may reject, and each plan adds its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from larder.core.errors import ScoreError
from larder.core.observation import Entries, LayerScores, Phase
from larder.core.plan import AddedEntries, Plan
from larder.policy.compensation.base import Compensation
from larder.policy.providers.restorekv import RESTORE_TOKENS

RESTOREKV = "restorekv"


@dataclass(frozen=True)
class RestoreKV(Compensation):
    """RestoreKV's added entries."""

    needs = frozenset({RESTOREKV})

    @property
    def added_entries(self) -> int:
        return RESTORE_TOKENS

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        if scored.phase is Phase.DECODE or plan.lengths == entries.lengths:
            return plan
        names = f"{RESTOREKV}.keys", f"{RESTOREKV}.values"
        if any(name not in scored.learned for name in names):
            raise ScoreError(
                "restorekv() was given no learned tokens: plan through a model's runtime."
            )
        keys, values = (scored.learned[name] for name in names)
        last = entries.packed_positions().max().long()
        positions = torch.full((keys.shape[1],), int(last), device=keys.device)
        return replace(plan, added=AddedEntries(keys, values, positions))


Part = RestoreKV
