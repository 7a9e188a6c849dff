"""Compensation token: one entry per head that represents all rejected ones (RazorAttention).

Tang et al., "RazorAttention: Efficient KV Cache Compression Through Retrieval Heads" (2024),
arXiv:2407.15891, section 3, equations 4 and 5: the compensation token. Its key and value are the
means of those of the N tokens that a head dropped, and it weighs as N of them: ln N on its logit,
which is exact where their keys are equal.

The paper keeps it beside what a head may hold. Our budgets are absolute, so it takes the slot of
one kept entry: the head's kept entry that already stands for several tokens (of more than one, for
the most), which is the compensation token of an earlier plan, else the kept and unprotected one of
the lowest score, which joins the mean that replaces it. It stands at the position of that slot.
An earlier compensation token that is rejected itself joins by its count, so that no token ever
counts twice or not at all. A head all of whose kept entries are protected has no such slot and
forgets what it rejects. Which heads are spared is up to the budget; the paper keeps all entries of
its retrieval heads. No code came with the paper. Huawei's msModelSlim and MindSpore Golden Stick
ship the choice of heads, with the same shares; how they make the token was not checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.observation import Entries, LayerScores
from larder.core.part import LOG_COUNT, Ledger
from larder.core.plan import Plan
from larder.policy.compensation._token_merge import (
    Indices,
    argmax_per_group,
    heads_of,
    merge_by_count,
    rejected_indices,
)
from larder.policy.compensation.base import Compensation


@dataclass(frozen=True)
class Razor(Compensation):
    """RazorAttention's compensation token."""

    ledger = Ledger(columns=(LOG_COUNT,))

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        rejected = rejected_indices(plan, entries)
        if not len(rejected):
            return plan
        slots = _slots(plan, entries, scored)[heads_of(rejected, entries)]
        return merge_by_count(plan, entries, rejected[slots >= 0], slots[slots >= 0])


def _slots(plan: Plan, entries: Entries, scored: LayerScores) -> Indices:
    """The packed entry of each head that is, or becomes, its compensation token; -1 for none."""
    logs, kept, heads = entries.column(LOG_COUNT), plan.kept, len(entries.lengths)
    owners = heads_of(torch.arange(len(logs), device=kept.device), entries)
    former = argmax_per_group(logs, owners, kept[logs[kept] > 0], heads)
    lowest = argmax_per_group(-scored.scores, owners, kept[~scored.protected[kept]], heads)
    return torch.where(former >= 0, former, lowest)


Part = Razor
