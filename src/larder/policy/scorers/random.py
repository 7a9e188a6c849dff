"""Keep entries at random: the control that every other scorer must beat.

No paper. A token keeps its luck from block to block, so that survival does not wear down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.observation import Seen
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer

# Odd multipliers of a 64-bit mixing function (SplitMix64, Steele et al. 2014), kept in 63 bits.
_MIX_1, _MIX_2, _MASK = 0x3F58476D1CE4E5B9, 0x14D049BB133111EB, (1 << 63) - 1
_GOLDEN = 0x1E3779B97F4A7C15


@dataclass(frozen=True)
class Random(Scorer):
    """A uniform number from each entry's layer, head and true position.

    Args:
        seed: another seed is another draw.
    """

    seed: int = 0

    def score(self, seen: Seen) -> Packed:
        heads = range(seen.layer.kv_heads)
        draws = [
            _uniform(seen.entries.head_positions(head).long(), self._stream(seen, head))
            for head in heads
        ]
        return torch.cat(draws)

    def _stream(self, seen: Seen, head: int) -> int:
        return (self.seed * 1_000_003 + seen.layer.index) * 1_009 + head


def _uniform(positions: torch.Tensor, stream: int) -> torch.Tensor:
    mixed = (positions + 1) * _GOLDEN + stream * _MIX_1
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
    return ((mixed ^ (mixed >> 31)) & 0xFFFFFF).float() / 0x1000000


Part = Random
