"""Pages selected for a decode step, and whether two layers may share a selection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from larder.core.observation import Entries


@dataclass(frozen=True)
class PageSelection:
    """Pages selected for one decode step, question or block.

    Args:
        pages: a row per set, -1 after the last.
        numbers: entry numbers of each page, -1 after the last.
        lengths: searchable entries of each kv head.
    """

    pages: Int64[Tensor, "N P"]
    versions: Int64[Tensor, "N P"]
    numbers: Int64[Tensor, "N P S"]
    lengths: tuple[int, ...]


class EntryNumberCheck:
    """Comparison of the entry numbers of two slow tiers, so that page selections can be shared.

    Each entry is compared once: an entry keeps its number.
    """

    def __init__(self, heads: int) -> None:
        self._alike: tuple[int, ...] | None = (0,) * heads  # of each head; None for different

    def agrees(self, current: Entries, other: Entries) -> bool:
        """True if all of `own` are the first entries of `other`, head by head."""
        if self._alike is None:
            return False
        ends = zip(self._alike, current.lengths, strict=True)
        for head, (seen, now) in enumerate(ends):
            left, right = current.head_positions(head), other.head_positions(head)
            if not torch.equal(left[seen:now], right[seen:now]):
                self._alike = None
                return False
        self._alike = current.lengths
        return True
