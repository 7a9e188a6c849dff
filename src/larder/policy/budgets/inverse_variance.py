"""Layers whose attention is spread evenly get more entries: their tokens are hard to tell apart.

Wan et al., "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large
Language Models" (2024), arXiv:2406.13035, section 4.1, eq. 4 and 5. F is the variance, over a
layer's entries, of the attention that each has received (the tally `mass`), averaged over heads;
layers share the memory by softmax(-F).

The paper takes the softmax of raw variances. They grow with the square of the length, so that all
memory would go to one layer: `paper` does that, down to the floors. `larder` standardizes log F
over the layers first. `code` scales the variances of a layer's heads to [0, 1] and averages them,
which compares heads and not layers, and keeps layers 0, 1 and the last whole; here only as far as
the floors of the others leave room, because a budget is a bound. Floors are a hundredth of the
longest layer (released code), at least 16 entries and what is protected.

The paper's 3 : 1 of heavy hitters to recent tokens holds in every layer. `protect` counts its
recent tokens by the average budget instead, so that a layer with a small share keeps few or no
heavy hitters beside them: protect fewer where that hurts.

Shares are found whenever text is read and the budget is full; while text is generated a layer keeps
the share it had.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.ledger import Ledger
from larder.core.observation import Scored, Seen, Stage
from larder.core.plan import Plan
from larder.core.types import Packed, Variant
from larder.ops.apportion import apportion
from larder.policy.budgets._selection import SHARE, best_per_head, standing, with_share
from larder.policy.budgets.base import Budget, check_size, over_in_all

FLOOR_TOKENS, FLOOR_SHARE = 16, 0.01
DECAY = 4.0  # e-foldings from the layer of lowest variance to that of the highest


class Rule(Enum):
    """How variances become shares: the paper's own, and what its table 4 compares with.

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
        tokens: entries per kv head, averaged over layers.
        kept: the same as a fraction of the context.
        rule: how variances become shares.
        temperature: divides F before the softmax; higher is more even.
        variant: `larder`, `paper` or `code`.
    """

    tokens: int | None = None
    kept: float | None = None
    rule: Rule = Rule.SOFTMAX
    temperature: float = 1.0
    variant: Variant = Variant.LARDER
    tallies = frozenset({"mass"})
    ledger = Ledger(scalars=(SHARE,))

    def __post_init__(self) -> None:
        check_size("inverse_variance", self.tokens, self.kept)
        if not 0 < self.temperature < math.inf:
            raise BadParameter(
                f"inverse_variance.temperature must be above 0, got {self.temperature}."
            )

    def measure(self, seen: Seen, scores: Packed) -> tuple[float, ...]:
        """F of the layer; nothing where its share stands already."""
        if seen.stage is Stage.GENERATING and not bool(seen.entries.scalars[SHARE].isnan().any()):
            return ()
        heads = torch.split(seen.entries.column("mass"), list(seen.entries.lengths))
        spreads = torch.stack([_variance(head) for head in heads])
        if self.variant is Variant.CODE:
            low, high = spreads.min(), spreads.max()
            spreads = (spreads - low) / (high - low + 1e-6)
        return (float(spreads.mean()),)

    def due(self, held: Mapping[int, int], allowed: Mapping[int, int]) -> bool:
        return over_in_all(held, allowed)

    def choose(self, ready: Mapping[int, Scored], quotas: Mapping[int, int]) -> dict[int, Plan]:
        judged = {index: scored for index, scored in ready.items() if not scored.measure}
        plans = {
            index: best_per_head(scored, standing(scored, quotas[index]))
            for index, scored in judged.items()
        }
        fresh = {index: scored for index, scored in ready.items() if scored.measure}
        if len(fresh) < len(quotas):
            return plans
        split = self._split(fresh, quotas)
        for index, scored in fresh.items():
            tokens = split.get(index)
            if tokens is None:
                plans[index] = best_per_head(scored, max(scored.lengths))
                continue
            plan = best_per_head(scored, tokens)
            plans[index] = with_share(plan, scored, tokens, quotas[index])
        return plans

    def _split(self, fresh: Mapping[int, Scored], quotas: Mapping[int, int]) -> dict[int, int]:
        """Entries per kv head of each layer; none where all fit."""
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
            floors = _whole_ends(floors, held, total)
        weights = self._weights([fresh[index].measure[0] for index in layers])
        weights = [weight * part for weight, part in zip(weights, parts, strict=True)]
        shares = apportion(total, weights, floors, held)
        return {i: share // part for i, share, part in zip(layers, shares, parts, strict=True)}

    def _floor(self, scored: Scored, tokens: int) -> int:
        """Entries per head that a layer keeps whatever its variance."""
        kept = max(int(part.sum()) for part in torch.split(scored.protected, list(scored.lengths)))
        hundredth = math.ceil(FLOOR_SHARE * max(scored.lengths))
        return min(tokens, max(FLOOR_TOKENS, hundredth, kept))

    def _weights(self, spreads: Sequence[float]) -> list[float]:
        """What each layer deserves."""
        if self.rule is Rule.UNIFORM:
            return [1.0] * len(spreads)
        if self.rule is Rule.RECIPROCAL:
            return [1 / max(spread, 1e-30) for spread in spreads]
        if self.rule is Rule.EXPONENTIAL_DECAY:
            ranks = [sum(other < spread for other in spreads) for spread in spreads]
            return [math.exp(-DECAY * rank / max(len(spreads) - 1, 1)) for rank in ranks]
        figures = spreads if self.variant is not Variant.LARDER else _standardized(spreads)
        least = min(figures)
        return [math.exp(-(figure - least) / self.temperature) for figure in figures]


def _variance(column: Tensor) -> Tensor:
    """Unbiased; 0 for fewer than two entries."""
    return column.double().var() if len(column) > 1 else column.new_zeros((), dtype=torch.float64)


def _standardized(spreads: Sequence[float]) -> list[float]:
    """z-scores of the logarithms: what remains of the variances when the length is taken out."""
    logs = [math.log(max(spread, 1e-30)) for spread in spreads]
    scale = max(statistics.pstdev(logs), 1e-9)
    return [(log - statistics.fmean(logs)) / scale for log in logs]


def _whole_ends(floors: list[int], held: list[int], total: int) -> list[int]:
    """Floors raised to all that is held for layers 0, 1 and the last, as far as there is room."""
    floors = list(floors)
    for place in dict.fromkeys((0, min(1, len(floors) - 1), len(floors) - 1)):
        floors[place] += min(held[place] - floors[place], max(total - sum(floors), 0))
    return floors


Part = InverseVariance
