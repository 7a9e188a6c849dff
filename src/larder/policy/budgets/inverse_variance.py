"""Layer budgets by inverse variance of attention: even attention gets more entries (D2O).

Wan et al., "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large
Language Models" (2024), arXiv:2406.13035, section 4.1, eq. 4 and 5. F is the variance, over a
layer's entries, of the attention that each has received (the tally `mass`), averaged over heads;
layers share the memory by softmax(-F).

`paper` takes the softmax of raw variances. They grow with the square of the length, so that all
memory goes to one layer, down to the floors. They also say less of a layer than of its first token,
which can draw more than half of all attention and stays anyway, and of age, since an early token is
seen by more queries than a late one.

`larder` therefore takes the variance of the attention received per query that could see the entry,
the first four tokens left aside, and the logarithm of its root for F: shares go by one over the
standard deviation, whatever the length. On SmolLM2-135M (six chats of LoCoMo, 1,200 tokens, a
quarter kept, nothing merged) that is .047 nats from the full cache, where equal layers are at .058;
with the first four tokens counted it is at .074.

`code` scales the variances of a layer's query heads to [0, 1] and averages them, which compares
heads and not layers, and keeps layers 0, 1 and the last whole. There these are on top of the
budget; here they are inside it, and whole only as far as the floors of the others leave room,
because a budget is a bound. It measures the queries of the pass that it plans after: all of the
text under `whole()`, as there, and under `blockwise()` those of the last block.

Floors are a hundredth of the longest layer (released code), at least 16 entries and what is
protected. A share of recent tokens, such as the paper's 3 : 1 of heavy hitters to them, is one of
each layer's own entries.

Shares are found whenever text is read and the budget is full; while text is generated a layer keeps
the share it had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.observation import LayerScores, Observation, Phase, ScoredLayers
from larder.core.part import Ledger
from larder.core.plan import LayerPlans, LayerQuotas, Plan, StepQuota
from larder.core.types import Packed, Variant
from larder.ops.apportionment import apportion
from larder.policy.aggregation.sum import Sum
from larder.policy.attention_reduction import gather_last_queries
from larder.policy.budgets._selection import (
    SHARE,
    entries_from_share,
    share_of_quota,
    top_k_per_head,
    with_layer_protection,
    with_share,
)
from larder.policy.budgets.base import Budget

FLOOR_TOKENS, FLOOR_SHARE = 16, 0.01
SINKS = 4  # first tokens that the variance is taken without, as many as the paper always keeps
DECAY = 4.0  # e-foldings from the layer of lowest variance to that of the highest


class Rule(Enum):
    """Rule from variances to shares: the paper's own, and those of its table 4.

    SOFTMAX: exp(-F). RECIPROCAL: 1 / F. UNIFORM: all the same. EXPONENTIAL_DECAY: by rank, each
    layer the same factor below the one before it; the paper's formula is not spelled out.
    """

    SOFTMAX = "softmax"
    RECIPROCAL = "reciprocal"
    EXPONENTIAL_DECAY = "exponential_decay"
    UNIFORM = "uniform"


@dataclass(frozen=True)
class InverseVariance(Budget):
    """Layer budgets by inverse variance; every head keeps its own best.

    Args:
        rule: how variances become shares.
        temperature: divides F before the softmax; higher is more even.
        variant: `larder`, `paper` or `code`.
    """

    rule: Rule = Rule.SOFTMAX
    temperature: float = 1.0
    variant: Variant = Variant.LARDER
    tallies = frozenset({"mass"})
    ledger = Ledger(scalars=(SHARE,))
    has_shared_pool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < math.inf:
            raise BadParameter(
                f"inverse_variance.temperature must be above 0, got {self.temperature}."
            )

    def observes_whole_text(self) -> bool:
        return self.variant is Variant.CODE

    def measure(self, observation: Observation, scores: Packed) -> tuple[float, ...]:
        """F of the layer; empty where its share is known already."""
        if observation.phase is Phase.DECODE and not bool(
            observation.entries.scalars[SHARE].isnan().any()
        ):
            return ()
        if self.variant is Variant.CODE:
            return (_within_query_heads(observation),)
        entries = observation.entries
        mass, lengths = entries.column("mass"), list(entries.lengths)
        if self.variant is Variant.LARDER:
            positions = entries.packed_positions()
            beyond = positions >= SINKS
            mass = (mass / (observation.length - positions))[beyond]
            lengths = [int(part.sum()) for part in torch.split(beyond, lengths)]
        heads = torch.split(mass, lengths)
        return (float(torch.stack([_variance(head) for head in heads]).mean()),)

    def step_quota(
        self, scalars: Mapping[str, Float[Tensor, " K"]], quota: int, tokens: int
    ) -> StepQuota | None:
        share = float(scalars[SHARE][0])  # written for all heads of a layer at once
        if math.isnan(share):
            return None
        count = share_of_quota(share, quota)
        return StepQuota(max(count, 0), count)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        judged = {index: scored for index, scored in ready.items() if not scored.measure}
        plans = {
            index: _top_k(scored, entries_from_share(scored, quotas[index]))
            for index, scored in judged.items()
        }
        fresh = {index: scored for index, scored in ready.items() if scored.measure}
        if len(fresh) < len(quotas):
            return plans
        split = self._split(fresh, quotas)
        for index, scored in fresh.items():
            tokens = split.get(index)
            if tokens is None:
                plans[index] = top_k_per_head(scored, max(scored.lengths))
                continue
            plans[index] = with_share(_top_k(scored, tokens), scored, tokens, quotas[index])
        return plans

    def _split(self, fresh: ScoredLayers, quotas: LayerQuotas) -> dict[int, int]:
        """Entries per kv head of each layer; empty where all fit."""
        layers = sorted(fresh)
        heads = [len(fresh[index].lengths) for index in layers]
        # Layers of equal width are shared out by entries per head, so that nothing is lost.
        width = heads[0] if len(set(heads)) == 1 else 1
        parts = [k // width for k in heads]
        total = sum(quotas[index] * part for index, part in zip(layers, parts, strict=True))
        held = [max(fresh[i].lengths) * part for i, part in zip(layers, parts, strict=True)]
        if total >= sum(held):
            return {}
        least = [self._floor(fresh[index], quotas[index]) for index in layers]
        floors = [min(a * part, b) for a, part, b in zip(least, parts, held, strict=True)]
        if self.variant is Variant.CODE:
            floors = _full_end_layers(floors, held, total)
        weights = self._weights([fresh[index].measure[0] for index in layers])
        weights = [weight * part for weight, part in zip(weights, parts, strict=True)]
        shares = apportion(total, weights, floors, held)
        return {i: share // part for i, share, part in zip(layers, shares, parts, strict=True)}

    def _floor(self, scored: LayerScores, tokens: int) -> int:
        """Entries per head that a layer keeps whatever its variance."""
        floor = max(FLOOR_TOKENS, math.ceil(FLOOR_SHARE * max(scored.lengths)))
        while (
            floor < tokens
            and (least := _most_protected(with_layer_protection(scored, floor))) > floor
        ):
            floor = least
        return min(tokens, floor)

    def _weights(self, spreads: Sequence[float]) -> list[float]:
        """Unnormalized share of each layer."""
        if self.rule is Rule.UNIFORM:
            return [1.0] * len(spreads)
        if self.rule is Rule.RECIPROCAL:
            return [1 / max(spread, 1e-30) for spread in spreads]
        if self.rule is Rule.EXPONENTIAL_DECAY:
            ranks = [sum(other < spread for other in spreads) for spread in spreads]
            return [math.exp(-DECAY * rank / max(len(spreads) - 1, 1)) for rank in ranks]
        figures = spreads if self.variant is not Variant.LARDER else _log_deviations(spreads)
        least = min(figures)
        return [math.exp(-(figure - least) / self.temperature) for figure in figures]


def _top_k(scored: LayerScores, tokens: int) -> Plan:
    """Plan in which every head keeps its own best, with protection relative to the layer."""
    return top_k_per_head(with_layer_protection(scored, tokens), tokens)


def _most_protected(scored: LayerScores) -> int:
    """Protected entries of the head that has most of them."""
    return max(int(part.sum()) for part in torch.split(scored.protected, list(scored.lengths)))


def _within_query_heads(observation: Observation) -> float:
    """The mean variance of the query heads, scaled so that the least is 0 and the highest 1."""
    columns = gather_last_queries(Sum(), observation, len(observation.query_positions))
    spreads = torch.stack([_variance(row) for head in columns for row in head])
    low, high = spreads.min(), spreads.max()
    return float(((spreads - low) / (high - low + 1e-6)).mean())


def _variance(column: Tensor) -> Tensor:
    """Unbiased; 0 for fewer than two entries."""
    return column.double().var() if len(column) > 1 else column.new_zeros((), dtype=torch.float64)


def _log_deviations(spreads: Sequence[float]) -> list[float]:
    """Logarithms of standard deviations: the length of the text cancels when they are compared."""
    return [math.log(max(spread, 1e-30)) / 2 for spread in spreads]


def _full_end_layers(floors: list[int], lengths: list[int], total: int) -> list[int]:
    """Floors raised to all that is held for layers 0, 1 and the last, as far as there is room."""
    floors = list(floors)
    for index in dict.fromkeys((0, min(1, len(floors) - 1), len(floors) - 1)):
        floors[index] += min(lengths[index] - floors[index], max(total - sum(floors), 0))
    return floors


Part = InverseVariance
