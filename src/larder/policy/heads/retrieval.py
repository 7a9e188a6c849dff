"""Mean over the best retrieval heads of a layer, for all its kv heads (CompressKV).

Lin et al., "CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before
Generation" (2025), arXiv:2508.02401, section 4.2: the query heads of a layer that score highest in
an offline test are averaged, and all kv heads keep the same entries. The test is the measurement
`retrieval` of the model; the paper's four heads are those of layers with 28 to 32.

The released code averages over 5 neighbors: take `snapkv(window=8, kernel=5, pool="mean")`. Where
kv heads hold different entries, which cannot come of this rule with budgets per head (`uniform`,
`eviction_error`), they are matched by true position, the mean is over the speaking heads that still
hold it, and what none of them holds is judged by the query heads of its own kv head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import ModelError
from larder.core.observation import Entries, Observation
from larder.core.spec import LayerSpec
from larder.policy.heads.base import HeadRule, mean_by_position, positions_of


@dataclass(frozen=True)
class Retrieval(HeadRule):
    """Mean over the best retrieval heads of a layer.

    Args:
        heads: number of query heads of each layer that vote; all where there are fewer.
    """

    heads: int = 4
    calibrations = frozenset({"retrieval"})

    def __post_init__(self) -> None:
        require(self.heads >= 1, "retrieval.heads", "at least 1", self.heads)

    def join(
        self, statistics: Sequence[Float[Tensor, "R _"]], entries: Entries, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        positions, group = positions_of(entries), observation.layer.group
        best = [
            (statistics[head // group][head % group], positions[head // group])
            for head in self._best_heads(observation.layer, observation.calibration["retrieval"])
        ]
        means = mean_by_position(best, positions)
        pairs = zip(statistics, positions, strict=True)
        return [
            means[own_positions].where(~means[own_positions].isnan(), head.mean(0))
            for head, own_positions in pairs
        ]

    def _best_heads(self, layer: LayerSpec, scores: tuple[float, ...]) -> list[int]:
        """The query heads with the highest scores; of equals the first."""
        if len(scores) != layer.query_heads:
            raise ModelError(
                f"Layer {layer.index} has {layer.query_heads} query heads, but the calibration "
                f"'retrieval' has {len(scores)} numbers for it: measure it again."
            )
        order = sorted(range(len(scores)), key=lambda head: -scores[head])
        return sorted(order[: self.heads])


Part = Retrieval
