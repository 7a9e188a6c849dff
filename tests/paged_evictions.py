"""Segments over pages with positions, columns and limits, for evictions behind a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from larder.ops import EntryMerging, EvictionLimits, PagedEntries
from paged_segments import some_segments

LENGTHS = (9, 1, 0, 12, 5, 6, 8, 2)
COUNTS = (8, 1, 0, 11, 5, 5, 7, 1)  # one goes from all but the second, third and fifth
RATES = (0.7, 0.7, 0.0, 0.7, 0.3, 0.0, 1.0, 0.5)
FIRSTS = (0, 0, 0, 2, 0, 90, 3, 1)  # of the sixth segment, all entries are spared
LASTS = (1, 0, 0, 4, 2, 0, 2, 1)
SLACK = 1e-5


@dataclass(frozen=True)
class StepSegments:
    """Entries of segments, what stays of them, and the state of merges."""

    entries: PagedEntries
    table: Tensor
    limits: EvictionLimits
    merging: EntryMerging
    newest: int

    @property
    def mass(self) -> Tensor:
        """Column with the scores."""
        return self.entries.columns[1]

    def clone(self) -> StepSegments:
        """Copy on storage of its own."""
        entries = PagedEntries(*(own.clone() for own in self.entries))
        merging = self.merging._replace(
            thresholds=self.merging.thresholds.clone(), log_counts=entries.columns[0]
        )
        return StepSegments(entries, self.table, self.limits, merging, self.newest)

    def to(self, device: str) -> StepSegments:
        """Copy on a device."""
        entries = PagedEntries(*(own.to(device) for own in self.entries))
        sides = {
            name: own.to(device)
            for name, own in self.merging._asdict().items()
            if isinstance(own, Tensor)
        }
        merging = self.merging._replace(**sides | {"log_counts": entries.columns[0]})
        limits = EvictionLimits(*(own.to(device) for own in self.limits))
        return StepSegments(entries, self.table.to(device), limits, merging, self.newest)


def step_segments(
    page_tokens: int = 4,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    lengths: Sequence[int] = LENGTHS,
    counts: Sequence[int] = COUNTS,
    seed: int = 0,
) -> StepSegments:
    """Segments with a column of biases and one of scores, some of them equal."""
    own = some_segments(lengths, page_tokens, head_dim=head_dim, dtype=dtype, seed=seed)
    source = torch.Generator().manual_seed(seed)
    shape = own.keys.shape[:2]
    positions = torch.zeros(shape, dtype=torch.int32)
    newest = 2 * max(lengths) - 1
    for segment, length in enumerate(lengths):
        rows = torch.arange(length)
        pages = own.tables.table[segment, rows // page_tokens].long()
        positions[pages, rows % page_tokens] = (newest - 2 * (length - 1 - rows)).int()
    columns = torch.rand(2, *shape, generator=source)
    columns[1] = (4 * columns[1]).ceil() / 4 if seed % 2 else columns[1]  # some are equal
    numbers = (torch.tensor(held, dtype=torch.int32) for held in (counts, FIRSTS, LASTS))
    stays, firsts, lasts = numbers
    limits = EvictionLimits(own.tables.lengths, stays, firsts, newest + 1 - lasts)
    thresholds = torch.rand(shape[0], generator=source) / 2
    thresholds[2::3] = torch.nan
    return StepSegments(
        PagedEntries(own.keys, own.values, positions, columns),
        own.tables.table,
        limits,
        EntryMerging(
            torch.tensor(RATES),
            SLACK,
            thresholds,
            torch.full((len(lengths),), newest, dtype=torch.int32),
            columns[0],
        ),
        newest,
    )
