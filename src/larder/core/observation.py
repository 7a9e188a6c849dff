"""Observation of one layer: its entries, queries and calibration, as scorers and budgets see
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int, Int8, Int64, Shaped
from torch import Tensor

from larder.core.plan import Plan
from larder.core.spec import LayerSpec
from larder.core.types import Packed, PackedMask, empty_tensor

# Dtypes of columns that numpy packs: several times faster than torch.
NUMPY_DTYPES = (torch.float32, torch.int32)


@dataclass(frozen=True)
class StorageStatistics:
    """Statistics that a storage measured of a layer before it assigns grades.

    Args:
        channels: weight of each key channel; empty where the storage needs none.
        weights: one number per packed entry; empty where the storage needs none.
        numbers: further statistics, in an order of the storage's own.
    """

    channels: Float[Tensor, "K D"] = field(
        default_factory=lambda: empty_tensor(torch.float32, 0, 0)
    )
    weights: Packed = field(default_factory=lambda: empty_tensor(torch.float32, 0))
    numbers: tuple[float, ...] = ()

    def after_plan(self, plan: Plan) -> StorageStatistics:
        """Statistics of the entries that a plan kept."""
        return replace(self, weights=self.weights[plan.kept]) if len(self.weights) else self


# Measurements of a model, by name: one number per managed layer, or one per head of each, layer by
# layer. Of a single layer: its own numbers.
Calibration = Mapping[str, tuple[float, ...]]
# Sets of token ids by name, such as the tokens that end a sentence.
Lexicon = Mapping[str, frozenset[int]]


@dataclass(frozen=True)
class Entries:
    """Cached entries of one layer: views into the cache, valid until it changes.

    Args:
        keys, values: flat storage; kv head h owns rows [starts[h], starts[h] + lengths[h]). Values
            of latents (MLA) are the first channels of the keys.
        positions: true positions, one per row of the storage.
        starts, lengths: one number per kv head.
        columns: float32 ledger columns by name, one number per row of the storage.
        scalars: float32 ledger scalars [K] by name.
        rope_positions: positions that keys are rotated to, one per row of the storage; empty where
            these are the true ones.
        grades: precision of each row, 0 the finest; empty where all have that.
    """

    keys: Float[Tensor, "C D"]
    values: Float[Tensor, "C Dv"]
    positions: Int[Tensor, " C"]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    columns: Mapping[str, Float[Tensor, " C"]] = field(default_factory=dict[str, Tensor])
    scalars: Mapping[str, Float[Tensor, " K"]] = field(default_factory=dict[str, Tensor])
    rope_positions: Int[Tensor, " _"] = field(default_factory=lambda: empty_tensor(torch.int32, 0))
    grades: Int8[Tensor, " G"] = field(default_factory=lambda: empty_tensor(torch.int8, 0))

    # Whether keys and values are decoded when they are asked for, and only those.
    is_coded: ClassVar[bool] = False

    @property
    def effective_rope_positions(self) -> Int[Tensor, " C"]:
        """Position that the key of each row is rotated to."""
        return self.rope_positions if len(self.rope_positions) else self.positions

    @property
    def empty_like(self) -> Float[Tensor, "0 D"]:
        """Empty tensor with the head size, dtype and device of the keys."""
        return self.keys[:0]

    def with_columns(self, columns: Mapping[str, Float[Tensor, " C"]]) -> Entries:
        """Copy with some columns replaced or added."""
        return replace(self, columns={**self.columns, **columns})

    @cached_property
    def layout(self) -> tuple[Int64[Tensor, " K"], Int64[Tensor, " K"]]:
        """Starts and lengths in host memory, as kernels take them."""
        return torch.tensor(self.starts), torch.tensor(self.lengths)

    @cached_property
    def _cuts(self) -> list[int]:
        """Lengths of slack and heads in turn, in storage order; empty where heads overlap."""
        edges = [0]
        for start, length in zip(self.starts, self.lengths, strict=True):
            edges += [start, start + length]
        edges.append(len(self.positions))
        cuts = [stop - start for start, stop in pairwise(edges)]
        return cuts if min(cuts) >= 0 else []

    def rows(self, head: int) -> slice:
        """Storage rows of a head's entries."""
        return slice(self.starts[head], self.starts[head] + self.lengths[head])

    def head_keys(self, head: int) -> Float[Tensor, "S D"]:
        return self.keys[self.rows(head)]

    def head_values(self, head: int) -> Float[Tensor, "S Dv"]:
        return self.values[self.rows(head)]

    def keys_from(self, head: int, first: int) -> Float[Tensor, "S D"]:
        """Keys of a head's entries from index `first` on."""
        return self.head_keys(head)[first:]

    def values_from(self, head: int, first: int) -> Float[Tensor, "S Dv"]:
        """Values of a head's entries from index `first` on."""
        return self.head_values(head)[first:]

    def keys_at(self, rows: Int64[Tensor, " M"]) -> Float[Tensor, "M D"]:
        """Keys of some storage rows."""
        return self.keys[rows]

    def gather(
        self, rows: Int64[Tensor, " M"], keys: Float[Tensor, "M D"], values: Float[Tensor, "M D"]
    ) -> None:
        """Copy keys and values of some storage rows into given host tensors."""
        torch.index_select(self.keys, 0, rows, out=keys)
        torch.index_select(self.values, 0, rows, out=values)

    def page_versions(
        self, versions: Int64[Tensor, "N P"], members: Int64[Tensor, "N P S"]
    ) -> Int64[Tensor, "N P"]:
        """Versions of pages; subclasses add the precision of the members."""
        return versions

    def head_positions(self, head: int) -> Int[Tensor, " S"]:
        return self.positions[self.rows(head)]

    def position_range(self, start: int, stop: int) -> Entries:
        """Entries at positions [start, stop), as views into the same storage."""
        starts: list[int] = []
        lengths: list[int] = []
        for head in range(len(self.lengths)):
            edges = torch.tensor([start, stop], device=self.positions.device)
            bounds = torch.searchsorted(self.head_positions(head).long(), edges)
            low, high = int(bounds[0]), int(bounds[1])
            starts.append(self.starts[head] + low)
            lengths.append(high - low)
        return replace(self, starts=tuple(starts), lengths=tuple(lengths))

    @cached_property
    def _packed_positions(self) -> Int[Tensor, " T"]:
        return self.pack(self.positions)

    def packed_positions(self) -> Int[Tensor, " T"]:
        """Positions of all entries, head by head, without slack; read-only."""
        return self._packed_positions

    def column(self, name: str) -> Packed:
        """Packed numbers of a ledger column."""
        return self.pack(self.columns[name])

    def packed_columns(self) -> Float[Tensor, "n T"]:
        """Packed numbers of all ledger columns, in order."""
        if not self.columns:
            return torch.zeros(0, sum(self.lengths), device=self.positions.device)
        return torch.stack([self.column(name) for name in self.columns])

    def packed_grades(self) -> Int8[Tensor, " T"]:
        """Packed grades of all entries, in host memory."""
        if not len(self.grades):
            return torch.zeros(sum(self.lengths), dtype=torch.int8)
        return self.pack(self.grades).cpu()

    def pack(self, stored: Shaped[Tensor, "C *rest"]) -> Shaped[Tensor, "T *rest"]:
        """Packed rows of a tensor with one row per storage row, head by head."""
        if stored.dim() == 1 and stored.device.type == "cpu" and stored.dtype in NUMPY_DTYPES:
            numbers = stored.detach().numpy()
            parts = [numbers[self.rows(head)] for head in range(len(self.lengths))]
            return torch.from_numpy(np.concatenate(parts))  # pyright: ignore
        if self._cuts:
            return torch.cat(stored.split_with_sizes(self._cuts)[1::2])
        return torch.cat([stored[self.rows(head)] for head in range(len(self.lengths))])

    def spread(
        self, numbers: Float[Tensor, "N *heads"], tokens: Int[Tensor, " C"]
    ) -> Float[Tensor, " C"]:
        """Number of each storage row from those of tokens, which kv heads share or not.

        Args:
            numbers: one per token, or one per token and kv head.
            tokens: token of each row.
        """
        if numbers.dim() == 1:
            return numbers[tokens]
        stored = numbers[tokens, 0]
        for head in range(1, numbers.shape[1]):
            rows = self.rows(head)
            stored[rows] = numbers[tokens[rows], head]
        return stored

    def unpack(self, packed: Packed) -> Float[Tensor, " C"]:
        """Storage-row layout of packed numbers; 0 in the slack."""
        stored = packed.new_zeros(len(self.positions))
        for head, part in enumerate(torch.split(packed, list(self.lengths))):
            stored[self.rows(head)] = part
        return stored


class ScoreScale(Enum):
    """Meaning of the differences of scores.

    WEIGHTS: ratios count, as those of attention weights.
    LOGARITHMS: natural logarithms of weights; differences count.
    """

    WEIGHTS = "weights"
    LOGARITHMS = "logarithms"


class Phase(Enum):
    """Phase of inference in which a layer is scored."""

    PREFILL = "reading"
    DECODE = "generating"


@dataclass(frozen=True)
class Observation:
    """One layer at the moment it is scored.

    Args:
        layer: spec of the layer.
        entries: its cached entries, the newest block included, scratch tokens excluded.
        queries: post-RoPE queries of the block (append pass) or of the scratch prompt.
        query_positions: their true positions.
        length: true tokens read so far.
        span: positions [start, stop) that this pass scores.
        ids: token ids of the pass, one per query.
        keys: post-RoPE keys of the same tokens; those of a scratch pass are in no cache.
        logits: attention logits of a single query over the storage rows, biases included, row r for
            query head r of each kv head; None where they were not recorded.
        phase: prefill or decode.
        calibration: measurements of this layer.
        lexicon: sets of token ids that the policy needs.
        rope_positions: positions that queries and `keys` are rotated to, for each kv head; empty
            where these are the true ones.
        inputs: what activation and weight providers give of this layer, by their names; only those
            that a part needs.
        latest: queries of the last tokens before the pass; None where no part needs them or there
            are none.
        watermark: true position below which entries are not judged again.
        weight_sums: attention weights of each entry, packed, summed over the queries of the pass
            and the query heads that share a kv head; None where they were not recorded.
    """

    layer: LayerSpec
    entries: Entries
    queries: Float[Tensor, "H Q D"]
    query_positions: Int[Tensor, " Q"]
    length: int
    span: tuple[int, int]
    ids: tuple[int, ...] = ()
    phase: Phase = Phase.PREFILL
    keys: Float[Tensor, "K Q D"] = field(
        default_factory=lambda: empty_tensor(torch.float32, 0, 0, 0)
    )
    logits: Float[Tensor, "R C"] | None = None
    calibration: Calibration = field(default_factory=dict[str, tuple[float, ...]])
    lexicon: Lexicon = field(default_factory=dict[str, frozenset[int]])
    rope_positions: Int[Tensor, "_ _"] = field(
        default_factory=lambda: empty_tensor(torch.int64, 0, 0)
    )
    inputs: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    latest: LatestQueries | None = None
    watermark: int = 0
    weight_sums: Float[Tensor, " T"] | None = None

    @property
    def effective_rope_positions(self) -> Int[Tensor, "K Q"]:
        """Position that each query is rotated to, for each kv head."""
        if self.rope_positions.numel():
            return self.rope_positions
        return self.query_positions.expand(self.layer.kv_heads, -1)


@dataclass(frozen=True)
class LayerScores:
    """Scores and protection of one layer: higher scores stay longer, protected entries always stay.

    Args:
        measure: statistics that the budget measured of this layer; empty where it needs none.
        scalars: ledger scalars of each kv head, by name.
        phase: prefill or decode.
        storage_statistics: statistics that the storage measured of the layer.
        weights: budget weight of each kv head; empty where the budget treats heads alike.
        protection: protected entries for a number of entries per head; None where that does not
            matter.
        learned: tensors of the providers that the compensation reads, by name.
        scale: meaning of the differences of scores.
    """

    scores: Packed
    protected: PackedMask
    lengths: tuple[int, ...]
    measure: tuple[float, ...] = ()
    scalars: Mapping[str, Float[Tensor, " K"]] = field(default_factory=dict[str, Tensor])
    phase: Phase = Phase.PREFILL
    storage_statistics: StorageStatistics = field(default_factory=StorageStatistics)
    weights: tuple[float, ...] = ()
    protection: Callable[[int], PackedMask] | None = None
    learned: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    scale: ScoreScale = ScoreScale.WEIGHTS

    def ranked(self) -> Packed:
        """Scores with the protected entries above all others."""
        return self.scores.masked_fill(self.protected, torch.inf)

    def on(self, device: torch.device) -> LayerScores:
        """Copy on another device, to be compared with layers there."""
        protection = self.protection

        def protected(count: int) -> Tensor:
            assert protection is not None
            return protection(count).to(device)

        return replace(
            self,
            scores=self.scores.to(device),
            protected=self.protected.to(device),
            scalars={name: scalar.to(device) for name, scalar in self.scalars.items()},
            protection=None if protection is None else protected,
        )

    def after_plan(self, plan: Plan) -> LayerScores:
        """Scores of the entries that a plan kept."""
        kept = plan.kept
        return replace(
            self,
            scores=self.scores[kept],
            protected=self.protected[kept],
            lengths=plan.lengths,
            storage_statistics=self.storage_statistics.after_plan(plan),
            protection=None,
        )


ScoredLayers = Mapping[int, LayerScores]  # by index of the layer


@dataclass(frozen=True)
class ScratchPrompt:
    """Token sequence of a scratch pass: read behind the cache for its queries, then discarded.

    Args:
        ids: token ids.
        span: positions [start, stop) of the cache that it scores.
        drafts: tokens that the model decodes greedily behind `ids` and that are read with them.
        shift: offset of its positions from right behind the cache; below 0 is earlier.
    """

    ids: tuple[int, ...]
    span: tuple[int, int]
    drafts: int = 0
    shift: int = 0

    @property
    def tokens(self) -> int:
        """Tokens read behind the cache, drafts included."""
        return len(self.ids) + self.drafts


# Names of prompts to token ids: "episode", "repeat", "summarize", "question", ...
Prompts = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class LatestQueries:
    """Post-RoPE queries of the latest tokens that a layer read, oldest first.

    Args:
        positions: true positions of the queries.
    """

    queries: Float[Tensor, "H N D"]
    positions: Int[Tensor, " N"]

    def extended(self, later: LatestQueries) -> LatestQueries:
        """Copy with later queries appended."""
        queries = torch.cat([self.queries, later.queries.to(self.queries)], 1)
        return LatestQueries(queries, torch.cat([self.positions, later.positions]))

    def last(self, count: int) -> LatestQueries:
        """View of the last `count` queries, or of all where there are fewer."""
        first = max(0, len(self.positions) - count)
        return LatestQueries(self.queries[:, first:], self.positions[first:])

    def before(self, position: int) -> LatestQueries:
        """View of the queries before a true position."""
        count = int((self.positions < position).sum())
        return LatestQueries(self.queries[:, :count], self.positions[:count])

    def clone(self) -> LatestQueries:
        """Copy on tensors of its own."""
        return LatestQueries(self.queries.clone(), self.positions.clone())

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors, the storage behind views included."""
        tensors = (self.queries, self.positions)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
