"""Pages that one layer found and others use: whose entries have which numbers.

A number means the same token in two layers where both parked the same tokens of each head in the
same order, as they do under policies that decide by position. That is looked at, not believed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from larder.core.observation import Entries


@dataclass(frozen=True)
class PageSelection:
    """Pages that were chosen for a step.

    Args:
        pages: a row per set, -1 behind the last.
        numbers: of the entries of each page, -1 behind the last.
        lengths: entries of each kv head that there were to choose from.
    """

    pages: Int64[Tensor, "N P"]
    versions: Int64[Tensor, "N P"]
    numbers: Int64[Tensor, "N P S"]
    lengths: tuple[int, ...]


class EntryNumberCheck:
    """Whether the entries of a slow tier have the numbers that they have in another one.

    Each is looked at once: what has a number keeps it.
    """

    def __init__(self, heads: int) -> None:
        self._alike: tuple[int, ...] | None = (0,) * heads  # of each head; None for different

    def agrees(self, own: Entries, other: Entries) -> bool:
        """Whether all of `own` are the first of `other`, head by head."""
        if self._alike is None:
            return False
        ends = zip(self._alike, own.lengths, strict=True)
        for head, (seen, now) in enumerate(ends):
            left, right = own.head_positions(head), other.head_positions(head)
            if not torch.equal(left[seen:now], right[seen:now]):
                self._alike = None
                return False
        self._alike = own.lengths
        return True
