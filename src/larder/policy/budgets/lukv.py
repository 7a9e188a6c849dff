"""Head budgets by the marginal utility of entries, from a curve measured for each head (LU-KV).

Tang et al., "Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV
Cache Eviction" (2026), arXiv:2602.08585: heads differ in how well a score foretells what later
tokens need. A curve of each head, measured once, says which utility the best entries by the score
hold; its concave hull turns the division of a budget over all heads of the model into a greedy
choice: the next entries go where they add most. The curves are the measurement `utility`, made
with the scorer `expected`, as in NVIDIA/kvpress 0.5.5, which reads shares from a published table of
one model.

Known to us from the abstract and from kvpress, which divides a layer's part among its heads as
here: whole numbers by largest remainder. Inferred: what utility is (see the measurement), and
protected entries, which come first. A layer's part is what the greedy choice over all layers gives
its heads. While text is generated, heads keep the proportion that they have. Made for `whole()`:
the curves are of a text that is cut once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from larder.core.observation import Calibration, LayerScores, Observation, Phase, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.core.types import Packed
from larder.ops.apportionment import apportion
from larder.ops.topk import top_mask
from larder.policy.budgets._selection import top_k_total
from larder.policy.budgets.base import Budget
from larder.policy.layer_calibration import split_evenly

UTILITY = "utility"
CURVE_POINTS = 16  # of a head's curve: the utility of its best 1/16, 2/16, ... of the entries
DIGITS = 9  # of slopes that count as equal
Curve = Sequence[float]


@dataclass(frozen=True)
class LUKV(Budget):
    """Head budgets by marginal utility, over all heads of the model.

    Args:
        tokens: entries per kv head, on average over the model.
    """

    calibrations = frozenset({UTILITY})

    def measure(self, observation: Observation, scores: Packed) -> tuple[float, ...]:
        """The curves of the layer's heads."""
        return tuple(observation.calibration[UTILITY])

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        if tokens >= most:
            return (tokens,) * layers
        heads = split_evenly(
            UTILITY, calibration[UTILITY], len(calibration[UTILITY]) // CURVE_POINTS
        )
        each = len(heads) // layers
        shares = greedy_shares(heads, len(heads) * (tokens - least) / (most - least))
        deserved = [sum(shares[layer * each : (layer + 1) * each]) for layer in range(layers)]
        parts = apportion(layers * (tokens - least), deserved, 0, most - least)
        return tuple(least + part for part in parts)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {index: _top_by_curves(scored, quotas[index]) for index, scored in ready.items()}


def greedy_shares(curves: Sequence[Curve], total: float) -> list[float]:
    """Share of its entries that each head keeps; the shares sum to `total`.

    Steps of all hulls are taken from the steepest on; of the last, and of all that are as steep,
    the same part.

    Args:
        curves: utility at equal steps of the share, of each head.
        total: at most the number of heads.
    """
    levels: dict[float, list[tuple[int, float]]] = {}
    for head, curve in enumerate(curves):
        for slope, width in concave_steps(curve):
            levels.setdefault(round(slope, DIGITS), []).append((head, width))
    shares, left = [0.0] * len(curves), total
    for slope in sorted(levels, reverse=True):
        whole = sum(width for _, width in levels[slope])
        part = min(1.0, max(left, 0.0) / whole)
        for head, width in levels[slope]:
            shares[head] += part * width
        left -= part * whole
    return shares


def concave_steps(curve: Curve) -> list[tuple[float, float]]:
    """Slope and width of each step of the concave hull of a curve that begins at 0."""
    corners = [(0.0, 0.0)]
    for index, height in enumerate(curve, 1):
        corner = (index / len(curve), height)
        while len(corners) > 1 and _slope(corners[-1], corner) >= _slope(corners[-2], corners[-1]):
            corners.pop()
        corners.append(corner)
    return [
        (_slope(one, other), other[0] - one[0])
        for one, other in zip(corners, corners[1:], strict=False)
    ]


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def _top_by_curves(scored: LayerScores, quota: int) -> Plan:
    """Plan in which heads keep their own best, `quota` each on average, divided by curves."""
    lengths = list(scored.lengths)
    count = min(quota * len(lengths), sum(lengths))
    shields = [int(part.sum()) for part in torch.split(scored.protected, lengths)]
    if count <= sum(shields):
        return top_k_total(scored, count)
    free = [length - shield for length, shield in zip(lengths, shields, strict=True)]
    parts = apportion(count - sum(shields), _deserved(scored, free, count - sum(shields)), 0, free)
    ranked = torch.split(scored.ranked(), lengths)
    masks: list[Tensor] = [
        top_mask(own, shield + part)
        for own, shield, part in zip(ranked, shields, parts, strict=True)
    ]
    return Plan.from_mask(torch.cat(masks), scored.lengths)


def _deserved(scored: LayerScores, free: Sequence[int], count: int) -> list[float]:
    """Entries that heads deserve beside the protected ones, before rounding.

    Heads without curves, and those of a step of generation, keep equal shares.
    """
    heads = len(free)
    if scored.phase is Phase.DECODE or len(scored.measure) % heads:
        return [float(own) for own in free]
    curves = split_evenly(UTILITY, scored.measure, heads)
    shares = greedy_shares(curves, heads * count / sum(free))
    return [share * part for share, part in zip(shares, free, strict=True)]


Part = LUKV
