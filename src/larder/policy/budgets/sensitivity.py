"""Layer budgets by measured sensitivity of keys to blockwise eviction; heads compete (EpiCache).

Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 3.2, eq. 8 to 10:
s = 1 - sigma, where sigma is the mean cosine between a layer's keys under the causal mask and
under a mask that hides what eviction would; budgets are proportional to s^alpha.

The paper lets a layer fall to nothing; its released code floors at a quarter without taking the
excess back. `larder` floors at a quarter and sums exactly; `paper` has no floor beyond what is
protected; `code` stretches sigma to [0, 1] first and floors, here summing exactly too, because a
budget is a bound. `floor` sets it apart from the variant. A floor hides a sharp alpha: once every
layer but one stands on it, a larger alpha changes nothing more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Calibration, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas
from larder.core.types import Variant
from larder.ops.apportionment import apportion
from larder.policy.budgets._selection import top_k_per_layer
from larder.policy.budgets.base import Budget

FLOORS = {Variant.LARDER: 0.25, Variant.PAPER: 0.0, Variant.CODE: 0.25}


@dataclass(frozen=True)
class Sensitivity(Budget):
    """Layer budgets from the measured sensitivity profile, joint selection within a layer.

    Args:
        alpha: how sharply sensitive layers are preferred; 0 is uniform. The paper finds 2 to 4
            best with its own formula; the code's scripts use 1.1 to 1.3 with theirs.
        variant: `larder`, `paper` or `code`.
        floor: the least that a layer gets, as a share of the average, in [0, 1]; what is protected
            stays in any case. None for that of the variant.
    """

    alpha: float = 2.0
    variant: Variant = Variant.LARDER
    floor: float | None = None
    calibrations = frozenset({"sensitivity"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.alpha < math.inf, "sensitivity.alpha", "0 or more", self.alpha)
        if self.floor is not None and not 0 <= self.floor <= 1:
            raise BadParameter(
                f"sensitivity.floor must be a share of the average in [0, 1], got {self.floor}."
            )

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        if tokens >= most:
            return (tokens,) * layers
        weights = [share**self.alpha for share in self._shares(calibration["sensitivity"])]
        share = FLOORS[self.variant] if self.floor is None else self.floor
        floor = max(least, int(share * tokens), 1 if share else 0)
        return apportion(layers * tokens, weights, min(floor, tokens), most)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {index: top_k_per_layer(scored, quotas[index]) for index, scored in ready.items()}

    def _shares(self, similarities: tuple[float, ...]) -> list[float]:
        """Sensitivity of each layer, before alpha; cosines may exceed 1 by rounding."""
        low, high = min(similarities), max(similarities)
        if high <= low:
            return [1.0] * len(similarities)
        if self.variant is Variant.CODE:
            return [1 - (sigma - low) / (high - low) for sigma in similarities]
        return [max(0.0, 1 - sigma) for sigma in similarities]


Part = Sensitivity
