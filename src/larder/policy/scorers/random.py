"""Random scorer: the control that every other scorer must beat.

No paper. The number of a token is the same in every block, so that survival does not decay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer

# Constants of the mixing function SplitMix64 (Steele, Lea and Flood, 2014); sums and products wrap.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_BITS = 24  # of the result that are used, so that float32 holds them exactly


@dataclass(frozen=True)
class Random(Scorer):
    """A uniform number from each entry's layer, head and true position.

    Args:
        seed: seed of the draw.
    """

    seed: int = 0

    def score(self, observation: Observation) -> Packed:
        draws = [
            _uniform(observation.entries.head_positions(head), self._stream(observation, head))
            for head in range(observation.layer.kv_heads)
        ]
        return torch.cat(draws)

    def _stream(self, observation: Observation, head: int) -> int:
        return (self.seed * 1_000_003 + observation.layer.index) * 1_009 + head


def _uniform(positions: Int[Tensor, " S"], stream: int) -> Float[Tensor, " S"]:
    """One number in [0, 1) per position, from the stream's own sequence."""
    start = np.uint64((stream * int(_MIX_2)) & 0xFFFFFFFFFFFFFFFF)
    mixed = start + (positions.cpu().numpy().astype(np.uint64) + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MIX_2
    top = (mixed ^ (mixed >> _SHIFTS[2])) >> np.uint64(64 - _BITS)
    return torch.tensor(top.astype(np.float32) / (1 << _BITS), device=positions.device)


Part = Random
