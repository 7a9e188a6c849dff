"""Layer budgets in two sizes, by how much attention changes the residual (SqueezeAttention).

Wang et al., "SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal
Budget" (2024), arXiv:2404.04793, section 4: layers are put into three groups by the cosine of what
passes through them before and after attention (k-means); those of the group with the highest
cosines get p times the average each, all others alike what is left. Within a layer every head keeps
its own best.

The cosines are the measurement `squeeze`, taken once of the model, where the paper takes them of
every prompt. Groups are found exactly, by trying all cuts of the sorted cosines, so that they do
not depend on where a search begins. With fewer than three different cosines there are as many
groups; one group shares alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from larder.core.arguments import require
from larder.core.observation import Calibration, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas
from larder.ops.apportionment import apportion
from larder.policy.budgets._selection import top_k_per_head, with_layer_protection
from larder.policy.budgets.base import Budget

GROUPS = 3


@dataclass(frozen=True)
class Squeeze(Budget):
    """Layer budgets in two sizes, by how much attention changes.

    Args:
        p: what a layer of the least important group gets, in averages, in (0, 1]; the paper finds
            0.3 to 0.4 best, as remembered; examples in its released code take 0.38 and 0.63. Less
            is raised to what is protected; a protected share is one of each layer's own entries.
    """

    p: float = 0.35
    calibrations = frozenset({"squeeze"})
    protects_own_share = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.p <= 1, "squeeze.p", "a fraction in (0, 1]", self.p)

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        if tokens >= most:
            return (tokens,) * layers
        edge = highest_group(calibration["squeeze"])
        small = sum(cosine >= edge for cosine in calibration["squeeze"])
        if small == layers:
            return (tokens,) * layers
        large = (layers - small * self.p) / (layers - small)
        weights = [self.p if cosine >= edge else large for cosine in calibration["squeeze"]]
        return apportion(layers * tokens, weights, least, most)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {
            index: top_k_per_head(with_layer_protection(scored, quotas[index]), quotas[index])
            for index, scored in ready.items()
        }


def highest_group(values: Sequence[float]) -> float:
    """Lowest value of the highest of three groups, for the split with the least scatter.

    Equal values stay in one group.
    """
    ordered = sorted(values)
    edges = [at for at in range(1, len(ordered)) if ordered[at] > ordered[at - 1]]
    cuts = combinations(edges, min(GROUPS - 1, len(edges)))
    best = min(cuts, key=lambda chosen: _scatter(ordered, (0, *chosen, len(ordered))))
    return ordered[best[-1]] if best else ordered[0]


def _scatter(ordered: Sequence[float], cuts: Sequence[int]) -> float:
    """Squared distances from the means of groups, summed."""
    groups = [ordered[start:stop] for start, stop in pairwise(cuts)]
    means = [sum(group) / len(group) for group in groups]
    pairs = zip(groups, means, strict=True)
    return sum((value - mean) ** 2 for group, mean in pairs for value in group)


Part = Squeeze
