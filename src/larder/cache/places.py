"""Where the entries of a layer lie that is held in several tiers.

    places   0 1 2 3 4 | 5 6 7 | 8 9 10      tier after tier; a tier's own order within
    packed   0 5 1 2 8 6 3 ...               what `entries` shows: by head, then by position

All of it is in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int8, Int64
from torch import Tensor

from larder.cache.quantized_tier import QuantizedTier
from larder.core.observation import Entries

HEAD_STRIDE = 1 << 32


@dataclass(frozen=True)
class TierOrder:
    """All entries, by place.

    Args:
        heads, positions, grades: of the entry at each place.
        order: the place of each packed entry.
        starts: the first place of each tier, the finest first.
    """

    heads: Int64[Tensor, " T"]
    positions: Int64[Tensor, " T"]
    grades: Int8[Tensor, " T"]
    order: Int64[Tensor, " T"]
    starts: tuple[int, ...]

    @staticmethod
    def of(finest: Entries, tiers: Sequence[QuantizedTier]) -> TierOrder:
        """Count the entries of the finest tier, then those of the others."""
        kv_heads = torch.arange(len(finest.lengths))
        owners = torch.repeat_interleave(kv_heads, torch.tensor(finest.lengths))
        heads = torch.cat([owners, *(tier.rows.heads() for tier in tiers)])
        positions = [finest.packed_positions(), *(tier.positions for tier in tiers)]
        packed = torch.cat([part.cpu().long() for part in positions])
        sizes = torch.tensor([len(part) for part in positions])
        grades = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int8), sizes)
        order = (heads * HEAD_STRIDE + packed).argsort()
        starts = (sizes.cumsum(0) - sizes).tolist()
        return TierOrder(heads, packed, grades, order, tuple(starts))

    def rows(self, grade: int, places: Int64[Tensor, " N"]) -> Int64[Tensor, " N"]:
        """Rows of a tier that lie at places of its own."""
        return places - self.starts[grade]

    def sorted(self, places: Int64[Tensor, " N"]) -> Int64[Tensor, " N"]:
        """Places in the order of the packed entries."""
        ranks = torch.empty_like(self.order)
        ranks[self.order] = torch.arange(len(self.order))
        return places[ranks[places].argsort()]
