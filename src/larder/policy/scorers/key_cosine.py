"""Scorer by the likeness of keys to those of a prompt that is read behind the cache (REFORM).

Song et al., "Compress, Gather, and Recompute: REFORMing Long-Context Processing in Transformers"
(2025), arXiv:2506.01215, the gather step: tokens are found again by the cosine between vectors that
layers made of them and those of the question, the highest over the question's tokens, summed over a
few heads, then smoothed by the highest among neighbors so that what stands around a found token
comes along. Known to us are the abstract and reviews, not the released code: which vectors are
compared is inferred. Here they are keys before rotation, since a rotated key says where a token
stands; each kv head has its own scores. The heads are those under whose keys hidden sentences rank
best (measurement `needle_rank`); `two_passes()` reads up to the deepest of their layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from larder.core.arguments import require
from larder.core.observation import Calibration, Observation
from larder.core.types import Packed
from larder.ops.pooling import running_max
from larder.ops.rope import rotate, rotate_per_head
from larder.policy.scorers._future_queries import rope_radians
from larder.policy.scorers.base import PromptScorer

ORDER = "needle_rank"  # of all kv heads, as fractions


@dataclass(frozen=True)
class KeyCosine(PromptScorer):
    """The highest cosine of an entry's key to a key of the prompt, before rotation.

    Args:
        prompt: its name: `question`, or any other whose text is given to `Engine.read`.
        kernel: width of the max pooling, in entries. Odd; 1 pools nothing.
        share: share of the kv heads of all layers that count, the best of a measured order, in
            (0, 1]; entries of others score 0. 1 for all, without a measurement.
    """

    prompt: str = "question"
    kernel: int = 7
    share: float = 1.0

    def __post_init__(self) -> None:
        require(self.kernel >= 1 and self.kernel % 2 == 1, "key_cosine.kernel", "odd", self.kernel)
        require(0 < self.share <= 1, "key_cosine.share", "in (0, 1]", self.share)

    def required_calibrations(self) -> frozenset[str]:
        return frozenset({ORDER}) if self.share < 1 else frozenset()

    def scored_layers(self, calibration: Mapping[int, Calibration]) -> frozenset[int] | None:
        """Layers that have a head that counts."""
        if self.share == 1:
            return None
        return frozenset(
            index for index, measured in calibration.items() if min(measured[ORDER]) < self.share
        )

    def score(self, observation: Observation) -> Packed:
        order = observation.calibration[ORDER] if self.share < 1 else ()
        radians = rope_radians(observation, "key_cosine")
        block_keys = rotate_per_head(
            observation.keys.float(), -observation.effective_rope_positions, radians
        )
        entries, positions = observation.entries, observation.entries.effective_rope_positions
        scores: list[Float[Tensor, " S"]] = []
        for head in range(observation.layer.kv_heads):
            rows = entries.rows(head)
            keys = rotate(entries.keys[rows].float()[None], -positions[rows], radians)[0]
            cosines = F.normalize(keys, dim=-1) @ F.normalize(block_keys[head], dim=-1).T  # [S, Q]
            best = running_max(cosines.amax(1), self.kernel)
            scores.append(best if not order or order[head] < self.share else torch.zeros_like(best))
        return torch.cat(scores)


Part = KeyCosine
