"""Slow tiers to find entries in: keys of unequal heads, with slack between them, that grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from larder.core import Entries, LayerSpec

SLACK = 3  # rows of NaN in front of each head: whoever reads them is found out


class Tier:
    """Keys and values per kv head, in the order in which they came."""

    def __init__(self, layer: LayerSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.layer = layer
        self._source = torch.Generator().manual_seed(seed)
        empty = torch.zeros(0, layer.head_dim, dtype=dtype)
        self.keys = [empty] * layer.kv_heads
        self.values = [empty] * layer.kv_heads

    def grow(self, counts: Sequence[int], scale: float = 1.0) -> None:
        """New random entries, so many per kv head; every sixth doubles another, or is zero."""
        for head, count in enumerate(counts):
            drawn = scale * self._normal(count)
            for row in range(5, count, 6):
                drawn[row] = drawn[row - 5] if row % 12 == 5 else 0.0
            self.keys[head] = torch.cat([self.keys[head], drawn.to(self.keys[head].dtype)])
            fresh = self._normal(count).to(self.keys[head].dtype)
            self.values[head] = torch.cat([self.values[head], fresh])

    def queries(self) -> Tensor:
        heads = self.layer.query_heads
        return torch.randn(heads, self.layer.head_dim, generator=self._source)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(head) for head in self.keys)

    def entries(self) -> Entries:
        """Entries that an index gets."""
        slack = torch.full((SLACK, self.layer.head_dim), torch.nan, dtype=self.keys[0].dtype)
        flat = [
            torch.cat([part for head in side for part in (slack, head)]) for side in self._sides
        ]
        starts, at = [], 0
        for length in self.lengths:
            starts.append(at + SLACK)
            at += SLACK + length
        positions = [
            part for length in self.lengths for part in (torch.zeros(SLACK), torch.arange(length))
        ]
        return Entries(*flat, torch.cat(positions).int(), tuple(starts), self.lengths)

    @property
    def _sides(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.keys, self.values

    def _normal(self, count: int) -> Tensor:
        return torch.randn(count, self.layer.head_dim, generator=self._source)


def pages_of(index: object, lengths: Sequence[int]) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Version and contents of every page of every kv head."""
    most = max(index.counts, default=0)
    pages = torch.arange(most).repeat(len(lengths), 1)
    pages = pages.masked_fill(pages >= torch.tensor(index.counts)[:, None], -1)
    contents, versions = index.contents(pages).tolist(), index.versions(pages).tolist()
    return [
        [
            (versions[head][page], tuple(n for n in contents[head][page] if n >= 0))
            for page in range(index.counts[head])
        ]
        for head in range(len(lengths))
    ]
