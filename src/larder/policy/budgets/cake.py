"""Layer budgets by entropy and variance of attention, recut as layers are scored (CAKE).

Qin et al., "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences" (2025),
arXiv:2503.12491, section 4. A layer's preference is H^(1/tau1) * V^(1/tau2): the entropy H of the
weights that the last queries give, and the variance V of each entry's weight over these queries,
both summed over entries and heads, the queries' own entries left out (as in the released code).
The layers judged so far share the whole cache by their preferences, so that memory never waits for
the last layer, and each can only lose from there on. Within a layer every head keeps its own best,
equally many. The paper's score of entries is `mean_variance`.

Differences: the released code rounds down and hands what is left over to all layers alike; here the
sum is exact and what is left over follows the preferences. Its tau are tuned by model and size of
cache, from 0.4 to 2.3; here they are 1 unless given. Layers still to come are taken to have as many
heads as the narrowest so far. While text is generated a layer keeps the share it had.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Observation, Phase, ScoredLayers
from larder.core.part import Ledger
from larder.core.plan import LayerPlans, LayerQuotas
from larder.core.types import Packed, WeightChunk
from larder.ops.apportionment import apportion
from larder.policy.aggregation.mean_variance import MeanVariance
from larder.policy.attention_reduction import check_taus, gather_last_queries, sum_statistics
from larder.policy.budgets._selection import (
    SHARE,
    entries_from_share,
    min_entries,
    top_k_even,
    with_share,
)
from larder.policy.budgets.base import Budget

MOMENTS = MeanVariance()


@dataclass(frozen=True)
class Cake(Budget):
    """Layer budgets by entropy and variance of attention, recut while the layers go by.

    Args:
        window: last queries whose weights are observed, in tokens.
        tau1: tempers the entropy; higher is more even.
        tau2: tempers the variance; higher is more even.
    """

    window: int = 32
    tau1: float = 1.0
    tau2: float = 1.0
    ledger = Ledger(scalars=(SHARE,))
    replans = True
    has_shared_pool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window >= 1, "cake.window", "at least 1 token", self.window)
        check_taus("cake", self.tau1, self.tau2)

    def measure(self, observation: Observation, scores: Packed) -> tuple[float, ...]:
        """Preference of the layer; empty where its share is known already."""
        if observation.phase is Phase.DECODE and not bool(
            observation.entries.scalars[SHARE].isnan().any()
        ):
            return ()
        entropy, variance = _dispersion(observation, self.window)
        return (entropy ** (1 / self.tau1) * variance ** (1 / self.tau2),)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        """Plans for layers that lose something, and for the newest."""
        judged = {index: scored for index, scored in ready.items() if not scored.measure}
        shares = {
            index: entries_from_share(scored, quotas[index] * len(scored.lengths))
            for index, scored in judged.items()
        }
        plans = {
            index: top_k_even(scored, shares[index])
            for index, scored in judged.items()
            if sum(scored.lengths) > shares[index] or index == max(ready)
        }
        fresh = {index: scored for index, scored in ready.items() if scored.measure}
        return plans | self._cut(fresh, quotas)

    def _cut(self, fresh: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        """Plans for the layers scored so far, which share the capacity of all."""
        if not fresh:
            return {}
        layers = sorted(fresh)
        heads = {index: len(scored.lengths) for index, scored in fresh.items()}
        narrowest = min(heads.values())
        pools = {index: quota * heads.get(index, narrowest) for index, quota in quotas.items()}
        total, held = sum(pools.values()), [sum(fresh[index].lengths) for index in layers]
        if total >= sum(held):
            return {layers[-1]: top_k_even(fresh[layers[-1]], held[-1])}
        lows = [min(min_entries(fresh[index]), pools[index]) for index in layers]
        sizes = apportion(total, [fresh[index].measure[0] for index in layers], lows, held)
        return {
            i: with_share(top_k_even(fresh[i], size), fresh[i], size, pools[i])
            for i, size in zip(layers, sizes, strict=True)
        }


class _EntropyVariance:
    """Entropy, and below it variance, of the weights that each entry gets; streamed."""

    def start(self, like: Float[Tensor, "R S"]) -> tuple[Tensor, ...]:
        return (like.new_zeros(like.shape), *MOMENTS.start(like))

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        state[0].sub_(torch.xlogy(weights, weights).sum(1))
        MOMENTS.fold(state[1:], weights, first, total)

    def finish(self, state: tuple[Tensor, ...], total: int) -> Float[Tensor, "N S"]:
        return torch.cat([state[0], state[2] / max(total - 1, 1)])


def _dispersion(observation: Observation, window: int) -> tuple[float, float]:
    """Entropy and variance of the last queries' weights, over all entries before these queries."""
    before = observation.entries.packed_positions() < observation.query_positions[-window:][0]
    heads = gather_last_queries(_EntropyVariance(), observation, window)
    marks = torch.split(before, list(observation.entries.lengths))
    earlier = [head[:, mark] for head, mark in zip(heads, marks, strict=True)]
    entropy, variance = sum_statistics(earlier, 2)
    return max(entropy, 0.0), variance


Part = Cake
