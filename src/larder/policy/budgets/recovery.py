"""Head budgets by kinds of entries: the fewest kinds that recover a share of attention (FastGen).

Ge et al., "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs" (2024),
arXiv:2310.01801: each head keeps the first of a row of policies, the cheapest first, under which
its attention recovers a threshold T. Here the kinds are the whole numbers of scores, as `fastgen`
gives them, from 4 and more down to 0 and less, and a policy keeps all kinds from one on, and what
is protected. Recovered is the mean over the last queries of the weight on what is kept, of that
query head of a kv head that recovers least (inferred: the paper's models have as many kv heads).

T is not given but found, so that all heads of the model fit the budget with the largest. The paper
gives .9 to .95, and its size follows. What is then left of the budget goes to the best entries of
all heads, and where protected entries and the first kind do not fit, the best entries of all stay.
While text is generated heads are judged again at every plan, by the newest query; the paper keeps
to the policy of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import LayerScores, Observation, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.core.types import Packed, PackedMask
from larder.ops.topk import top_mask
from larder.policy.aggregation.mean import Mean
from larder.policy.attention_reduction import gather_last_queries
from larder.policy.budgets.base import CrossLayerBudget

KINDS = (4, 3, 2, 1, 0)
NOTHING_KNOWN = (0.0, 0.0, 0.0, 0.0, 1.0)  # only all kinds together recover attention


@dataclass(frozen=True)
class Recovery(CrossLayerBudget):
    """Whole kinds of entries, as few as recover the same share of attention in all heads.

    Args:
        window: last queries whose attention is to be recovered, in tokens.
    """

    window: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window >= 1, "recovery.window", "at least 1 token", self.window)

    def inspect(
        self, observation: Observation, scores: Packed, protected: PackedMask
    ) -> tuple[float, ...]:
        """Recovered share of each kv head under each of its policies, the cheapest first."""
        lengths = list(observation.entries.lengths)
        heads = gather_last_queries(Mean(), observation, self.window)
        own = torch.split(scores, lengths), torch.split(protected, lengths)
        parts = zip(heads, *own, strict=True)
        shares = [
            float(weights[:, (kinds >= kind) | mark].sum(1).amin()) if kind else 1.0
            for weights, kinds, mark in parts
            for kind in KINDS
        ]
        return tuple(shares)

    def _choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        total = sum(quotas[index] * len(scored.lengths) for index, scored in ready.items())
        policies = [each for scored in ready.values() for each in _policies(scored)]
        threshold = _threshold(policies, total)
        marks = [_cheapest(policy, threshold) for policy in policies]
        if sum(int(mark.sum()) for mark in marks) > total:
            marks = [torch.zeros_like(mark) for mark in marks]
        ranked = torch.cat([scored.ranked() for scored in ready.values()])
        chosen = top_mask(ranked.masked_fill(torch.cat(marks), torch.inf), total)
        sizes = [sum(scored.lengths) for scored in ready.values()]
        pairs = zip(ready.items(), torch.split(chosen, sizes), strict=True)
        return {index: Plan.from_mask(mark, scored.lengths) for (index, scored), mark in pairs}


@dataclass(frozen=True)
class HeadPolicies:
    """Policies of one kv head, the cheapest first.

    Args:
        shares: recovered by each.
        marks: entries kept by each.
    """

    shares: tuple[float, ...]
    marks: Bool[Tensor, "N S"]


def _policies(scored: LayerScores) -> list[HeadPolicies]:
    lengths, count = list(scored.lengths), len(KINDS)
    measured = scored.measure
    if len(measured) != len(lengths) * count:
        measured = NOTHING_KNOWN * len(lengths)
    own = torch.split(scored.scores, lengths), torch.split(scored.protected, lengths)
    parts = zip(*own, strict=True)
    return [
        HeadPolicies(measured[count * head : count * (head + 1)], _kept(scores, protected))
        for head, (scores, protected) in enumerate(parts)
    ]


def _kept(scores: Float[Tensor, " S"], protected: Bool[Tensor, " S"]) -> Bool[Tensor, "N S"]:
    every = [(scores >= kind) | protected for kind in KINDS[:-1]]
    return torch.stack([*every, torch.ones_like(protected)])


def _cheapest(policies: HeadPolicies, threshold: float) -> Bool[Tensor, " S"]:
    """Entries kept by the first policy that recovers the threshold."""
    fits = (index for index, share in enumerate(policies.shares) if share >= threshold)
    return policies.marks[next(fits, len(policies.shares) - 1)]


def _threshold(policies: list[HeadPolicies], total: int) -> float:
    """Largest threshold at which all heads fit; 0 if there is none."""
    known = sorted({min(share, 1.0) for policy in policies for share in policy.shares} | {0.0})
    low, high = 0, len(known)
    while high - low > 1:
        middle = (low + high) // 2
        held = sum(int(_cheapest(policy, known[middle]).sum()) for policy in policies)
        low, high = (middle, high) if held <= total else (low, middle)
    return known[low]


Part = Recovery
