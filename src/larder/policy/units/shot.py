"""Examples of a few-shot prompt, kept or evicted together (ShotKV).

Liu et al., "Can LLMs Maintain Fundamental Abilities under KV Cache Compression?" (2025),
arXiv:2502.01941 (ShotKV): an example's score is the mean attention to its tokens, over heads and
layers, and whole examples stay, the best first, while they fit. Examples are told apart by blank
lines, where the tokenizer has tokens for these. Scores of all heads of a layer are joined by
`layer_mean`, those of layers by `layers`, which takes the scores of the first of them (the paper
averages over layers). Whole examples alone stay under the budget `entire`. Tokens of an
example that no budget holds whole, such as a text without blank lines, are judged one by one
(ours), and so are those that are generated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from larder.core.arguments import require
from larder.core.observation import Observation, Phase
from larder.core.types import Packed
from larder.policy.units.base import Unit, group_labels, pool_groups


@dataclass(frozen=True)
class Shot(Unit):
    """Mean score of an example.

    Args:
        layers: consecutive layers that share the scores of the first of them.
        longest: tokens of the longest example that is kept whole; left open, the budget.
    """

    layers: int = 1
    longest: int | None = None
    tallies = frozenset({"shot"})

    def __post_init__(self) -> None:
        longest = self.longest
        require(self.layers >= 1, "shot.layers", "at least 1", self.layers)
        require(longest is None or longest >= 1, "shot.longest", "at least 1 token", longest)

    @property
    def layers_together(self) -> int:
        return self.layers

    def with_budget(self, tokens: int) -> Shot:
        return replace(self, longest=tokens) if self.longest is None else self

    def pool(self, scores: Packed, observation: Observation) -> Packed:
        if observation.phase is Phase.DECODE:
            return scores
        spans, lengths = (
            observation.entries.column("shot").abs().long(),
            observation.entries.lengths,
        )
        pooled = pool_groups(scores, spans, lengths, len(scores))
        if self.longest is None or not len(scores):
            return pooled
        labels = group_labels(spans, lengths)
        return torch.where(labels.bincount()[labels] > self.longest, scores, pooled)


Part = Shot
