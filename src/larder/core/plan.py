"""What becomes of each cached entry: the word between a policy and a cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Int64
from torch import Tensor

from larder.core.types import PackedMask


class Fate(Enum):
    """What can become of an entry. `drop` compensation knows KEEP and DROP."""

    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True)
class Plan:
    """The entries of one layer that stay; all others get the fate of the policy's compensation.

    Args:
        kept: indices into the packed entries [T], ascending.
        lengths: how many of them each kv head has.
    """

    kept: Int64[Tensor, " T"]
    lengths: tuple[int, ...]

    @staticmethod
    def from_mask(keep: PackedMask, lengths: tuple[int, ...]) -> Plan:
        """The plan that keeps the marked entries of heads with `lengths` entries each."""
        counts = tuple(int(part.sum()) for part in torch.split(keep, list(lengths)))
        return Plan(torch.nonzero(keep).flatten(), counts)
