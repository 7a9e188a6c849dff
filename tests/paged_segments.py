"""Random segments over pages in no order, with slack that holds garbage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from larder.ops import SegmentTables


@dataclass(frozen=True)
class PagedSegments:
    """Keys and values [N, P, D], queries [S, R, Q, D], and the tables of S segments."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    bias: Tensor
    tables: SegmentTables
    scaling: float = 0.4

    @property
    def layout(self) -> tuple[Tensor, Tensor]:
        return self.tables.table, self.tables.lengths

    @property
    def starts(self) -> Tensor:
        return self.tables.lengths.long().cumsum(0) - self.tables.lengths


def some_segments(
    lengths: Sequence[int],
    page_tokens: int,
    queries: tuple[int, int] = (2, 1),
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedSegments:
    """Segments of the given lengths; queries are R and Q."""
    source = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_tokens) for length in lengths]
    num_pages, width = sum(counts) + 3, max(1, *counts)
    free = (1 + torch.randperm(num_pages - 1, generator=source)).tolist()
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    for segment, count in enumerate(counts):
        pages, free = free[:count], free[count:]
        table[segment, :count] = torch.tensor(pages, dtype=torch.int32)
    shape = num_pages, page_tokens, head_dim
    keys, values = torch.randn(2, *shape, generator=source).to(dtype)
    asked = torch.randn(len(lengths), *queries, head_dim, generator=source).to(dtype)
    bias = torch.randn(shape[:2], generator=source)
    ahead = torch.arange(len(lengths) + 1, dtype=torch.int32)
    held = torch.tensor(lengths, dtype=torch.int32)
    offsets = ahead * queries[1], ahead * width * page_tokens
    tables = SegmentTables(table, held, *offsets)
    return PagedSegments(keys, values, asked, bias, tables)


def padded_places(kept: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Kept places [S, M], 0 behind those of a segment, and their counts."""
    counts = torch.tensor([len(own) for own in kept], dtype=torch.int32)
    indices = torch.zeros(len(kept), int(counts.max()), dtype=torch.int32)
    for segment, own in enumerate(kept):
        indices[segment, : len(own)] = torch.tensor(own, dtype=torch.int32)
    return indices, counts


def kept_indices(lengths: Sequence[int], kept: float, seed: int = 0) -> list[list[int]]:
    """Some places of each segment, ascending."""
    source = torch.Generator().manual_seed(seed)
    return [sorted(torch.randperm(n, generator=source)[: int(kept * n)].tolist()) for n in lengths]
