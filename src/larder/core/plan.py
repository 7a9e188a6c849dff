"""What becomes of each cached entry: the word between a policy and a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int8, Int64
from torch import Tensor

from larder.core.types import PackedMask, empty_tensor


@dataclass(frozen=True)
class Folds:
    """Entries that become weighted sums of entries.

    Every entry that is a target is replaced by the sum of its rows; one that shall keep a part of
    itself has a row in which it is its own source. Sums are taken in float32.

    Args:
        sources, targets: indices into the packed entries [T] as they are before the plan; targets
            are among the kept.
        key_weights, value_weights: float32 factors, one per row.
    """

    sources: Int64[Tensor, " F"]
    targets: Int64[Tensor, " F"]
    key_weights: Float[Tensor, " F"]
    value_weights: Float[Tensor, " F"]

    @staticmethod
    def none(device: torch.device | None = None) -> Folds:
        """Nothing is folded."""
        none, weights = empty_tensor(torch.int64, 0), empty_tensor(torch.float32, 0)
        if device is not None:
            none, weights = none.to(device), weights.to(device)
        return Folds(none, none, weights, weights)

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class Plan:
    """The entries of one layer that stay; all others get the fate of the policy's compensation.

    Args:
        kept: indices into the packed entries [T], ascending.
        lengths: how many of them each kv head has.
        folds: what is merged into the kept before the rest goes.
        columns: new values [T'] of columns of the ledger, in the order of `kept`; the others move
            along unchanged.
        scalars: new values [K] of scalars of the ledger.
        grades: for a cache of several precisions, the grade of each kept entry [T'], 0 the finest;
            empty where all keep the grade they have.
        channels: a weight per channel of each head's keys [K, D], for grades that choose or level
            channels by it; empty where each group shall go by its own keys.
        dropped: indices, ascending, of those that do not stay and go for good, where a compensation
            parks the rest; where it parks nothing, all of them go.
    """

    kept: Int64[Tensor, " T"]
    lengths: tuple[int, ...]
    folds: Folds = field(default_factory=Folds.none)
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    scalars: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    grades: Int8[Tensor, " G"] = field(default_factory=lambda: empty_tensor(torch.int8, 0))
    channels: Float[Tensor, "K D"] = field(
        default_factory=lambda: empty_tensor(torch.float32, 0, 0)
    )
    dropped: Int64[Tensor, " X"] = field(default_factory=lambda: empty_tensor(torch.int64, 0))

    @staticmethod
    def from_mask(keep: PackedMask, lengths: tuple[int, ...]) -> Plan:
        """The plan that keeps the marked entries of heads with `lengths` entries each."""
        kept = torch.nonzero(keep).flatten()
        if len(set(lengths)) == 1:
            counts = keep.view(len(lengths), -1).sum(1)
        else:
            counts = torch.stack([part.sum() for part in torch.split(keep, list(lengths))])
        return Plan(kept, tuple(counts.tolist()))  # pyright: ignore
