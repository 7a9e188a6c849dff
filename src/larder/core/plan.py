"""Eviction plans: which entries of a layer stay, which are merged, and at what precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from jaxtyping import Float, Int8, Int64
from torch import Tensor

from larder.core.types import PackedMask, empty_tensor


@dataclass(frozen=True)
class Folds:
    """Merges: weighted sums of source entries that replace target entries.

    Every target is replaced by the sum over its rows; a target that keeps a part of itself has a
    row in which it is its own source. Sums are taken in float32.

    Args:
        sources, targets: indices into the packed entries [T] before the plan; targets are kept
            entries.
        key_weights, value_weights: float32 factors, one per row.
    """

    sources: Int64[Tensor, " F"]
    targets: Int64[Tensor, " F"]
    key_weights: Float[Tensor, " F"]
    value_weights: Float[Tensor, " F"]

    @staticmethod
    def none(device: torch.device | None = None) -> Folds:
        """Empty set of merges."""
        none, weights = empty_tensor(torch.int64, 0), empty_tensor(torch.float32, 0)
        if device is not None:
            none, weights = none.to(device), weights.to(device)
        return Folds(none, none, weights, weights)

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class AddedEntries:
    """Entries that a plan adds behind those that stay, as many in each kv head.

    Args:
        keys: post-RoPE.
        positions: true positions, none before that of an entry that stays.
    """

    keys: Float[Tensor, "K N D"]
    values: Float[Tensor, "K N Dv"]
    positions: Int64[Tensor, " N"]


@dataclass(frozen=True)
class Plan:
    """Plan of one layer: the entries that stay; all others get the fate of the compensation.

    Args:
        kept: indices into the packed entries [T], ascending.
        lengths: kept entries of each kv head.
        folds: merges into kept entries, done before the rest is removed.
        columns: new values [T'] of ledger columns, in the order of `kept`; other columns keep the
            values of the kept entries.
        scalars: new values [K] of ledger scalars.
        grades: in a cache of several precisions, the grade of each kept entry [T'], 0 the finest;
            empty where grades do not change.
        channels: weight of each key channel of each head [K, D], for grades that select or balance
            channels; empty where each group uses statistics of its own keys.
        importance: binary logarithm of the importance of each kept entry [T'], for storages that
            divide precision by it; NaN where the scores are no weights; empty elsewhere.
        allowed_bytes: bytes that the kept entries may fill, in storages that fit their precision to
            it; 0 elsewhere.
        step: quantization step of transform-coded entries; 0 leaves it to the cache.
        dropped: ascending indices of the rejected entries that are dropped for good, where the
            compensation offloads the rest; without offload, all rejected entries are dropped.
        added: entries that `SequenceCache` appends once the plan is carried out; None for none.
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
    importance: Float[Tensor, " I"] = field(default_factory=lambda: empty_tensor(torch.float32, 0))
    allowed_bytes: int = 0
    step: float = 0.0
    dropped: Int64[Tensor, " X"] = field(default_factory=lambda: empty_tensor(torch.int64, 0))
    added: AddedEntries | None = None

    def on(self, device: torch.device) -> Plan:
        """Copy of the plan without merges and additions, on the device of its layer."""
        return replace(
            self,
            kept=self.kept.to(device),
            dropped=self.dropped.to(device),
            grades=self.grades.to(device),
            columns={name: own.to(device) for name, own in self.columns.items()},
            scalars={name: own.to(device) for name, own in self.scalars.items()},
        )

    @staticmethod
    def from_mask(keep: PackedMask, lengths: tuple[int, ...]) -> Plan:
        """Plan that keeps the entries that a packed mask marks.

        Args:
            lengths: entries of each kv head before the plan.
        """
        kept = torch.nonzero(keep).flatten()
        if len(set(lengths)) == 1:
            counts = keep.view(len(lengths), -1).sum(1)
        else:
            counts = torch.stack([part.sum() for part in torch.split(keep, list(lengths))])
        return Plan(kept, tuple(counts.tolist()))  # pyright: ignore


LayerPlans = dict[int, Plan]  # by index of the layer
LayerQuotas = Mapping[int, int]  # entries per kv head, by index of the layer


@dataclass(frozen=True)
class StepMerging:
    """Merging of rejected entries into the nearest kept one, above a moving threshold.

    Args:
        scalar: ledger scalar with the threshold of each kv head.
        rate: how fast the threshold follows, in (0, 1].
        slack: distance below the threshold at which an entry is still merged.
    """

    scalar: str
    rate: float
    slack: float


@dataclass(frozen=True)
class StepSpreading:
    """Spreading of the values of rejected entries over the kept ones behind them (CaM).

    Args:
        column: ledger column with the total weight of the values merged into each entry.
        window: kept entries that a value is spread over.
        seed: seed of the draws; None to add values times their probability.
    """

    column: str
    window: int
    seed: int | None


@dataclass(frozen=True)
class StepQuota:
    """Entries of a layer after a decode step; each kv head keeps its own best.

    Args:
        count: entries that each kv head keeps.
        protected_by: entries per kv head that protected shares are relative to.
    """

    count: int
    protected_by: int


class StepColumn(Enum):
    """Ledger columns that a kernel updates in a decode step.

    MASS: sum of the attention so far. NEWEST: attention of the newest query. COUNT, MEAN and
    SPREAD: moments of the attention of each query.
    """

    MASS = "mass"
    NEWEST = "newest"
    COUNT = "count"
    MEAN = "mean"
    SPREAD = "spread"


class StepScore(Enum):
    """Score of entries in a decode step.

    MASS: the column. LAYER_MEAN: attention of the newest query, the mean over the layer's query
    heads. RAISED_MEAN: the mean of the moments, plus 1 for the entries that vary most.
    POSITION: the true position, infinite for the first ones.
    """

    MASS = "mass"
    LAYER_MEAN = "layer_mean"
    RAISED_MEAN = "raised_mean"
    POSITION = "position"


@dataclass(frozen=True)
class StepScoring:
    """Score of entries in a decode step, and its parameters.

    Args:
        sinks: tokens at the start whose score by `POSITION` is infinite.
        spared: share of a head's entries that `RAISED_MEAN` raises.
    """

    score: StepScore
    sinks: int = 0
    spared: float = 0.0


@dataclass(frozen=True)
class StepRule:
    """Eviction of a decode step that a kernel can carry out.

    Args:
        scoring: score by which entries are rejected.
        merging: fate of rejected entries; None to drop them.
        columns: name of each ledger column that the step updates.
    """

    scoring: StepScoring
    merging: StepMerging | StepSpreading | None
    columns: Mapping[StepColumn, str]

    @property
    def uses_attention(self) -> bool:
        """True if logits of the newest query are needed."""
        return bool(self.columns) or self.scoring.score is StepScore.LAYER_MEAN

    @property
    def is_accumulating(self) -> bool:
        """True for a score that attention is added to at every step, and no other column."""
        by_mass = self.scoring.score is StepScore.MASS and set(self.columns) == {StepColumn.MASS}
        return by_mass and not isinstance(self.merging, StepSpreading)

    @property
    def is_undoable(self) -> bool:
        """False where values are spread over many entries, which the kernel does not note."""
        return not isinstance(self.merging, StepSpreading)
