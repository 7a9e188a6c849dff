"""Examples of a few-shot prompt, kept or evicted together (ShotKV).

Liu et al., "Can LLMs Maintain Fundamental Abilities under KV Cache Compression?" (2025),
arXiv:2502.01941 (ShotKV): an example's score is the mean attention to its tokens, over heads and
layers, and whole examples stay, the best first, while they fit. Examples are told apart by blank
lines, where the tokenizer has tokens for these. Scores of all heads of a layer are joined by
`layer_mean`, those of layers by `layers`, which takes the scores of the first of them (the paper
averages over layers). Whole examples alone stay under the budget `entire`. While text is
generated entries are judged one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.errors import BadParameter
from larder.core.observation import Observation, Phase
from larder.core.types import Packed
from larder.policy.units.base import Unit, pool_groups


@dataclass(frozen=True)
class Shot(Unit):
    """Mean score of an example.

    Args:
        layers: consecutive layers that share the scores of the first of them.
    """

    layers: int = 1
    tallies = frozenset({"shot"})

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise BadParameter(f"shot.layers must be at least 1, got {self.layers}.")

    @property
    def layers_together(self) -> int:
        return self.layers

    def pool(self, scores: Packed, seen: Observation) -> Packed:
        if seen.stage is Phase.DECODE:
            return scores
        labels = seen.entries.column("shot").abs().long()
        return pool_groups(scores, labels, seen.entries.lengths, len(scores))


Part = Shot
