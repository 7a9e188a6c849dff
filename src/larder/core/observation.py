"""What a layer saw: all that a scorer may base its judgement on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int, Int8, Int64, Shaped
from torch import Tensor

from larder.core.plan import Plan
from larder.core.spec import LayerSpec
from larder.core.types import Packed, PackedMask, Positions, Queries, empty_tensor


@dataclass(frozen=True)
class StorageStatistics:
    """What a storage found out about a layer.

    Args:
        channels: the weight of each key channel; empty where nobody asked.
        weights: a number per packed entry; empty where nobody asked.
        numbers: whatever else it will need.
    """

    channels: Float[Tensor, "K D"] = field(
        default_factory=lambda: empty_tensor(torch.float32, 0, 0)
    )
    weights: Packed = field(default_factory=lambda: empty_tensor(torch.float32, 0))
    numbers: tuple[float, ...] = ()

    def after_plan(self, plan: Plan) -> StorageStatistics:
        """The same of those entries that a plan kept."""
        return replace(self, weights=self.weights[plan.kept]) if len(self.weights) else self


# What was measured about a model, by name: a number per managed layer, or one per head of each,
# layer by layer. Of a single layer: its own numbers.
Calibration = Mapping[str, tuple[float, ...]]
# What columns hold: numpy puts the heads of one together several times faster than torch does.
NUMPY_DTYPES = (torch.float32, torch.int32)
# Sets of token ids by name, such as the tokens that end a sentence.
Lexicon = Mapping[str, frozenset[int]]


@dataclass(frozen=True)
class Entries:
    """The cached entries of one layer: views into the cache, valid until it changes.

    Args:
        keys, values: flat storage; kv head h owns rows [starts[h], starts[h] + lengths[h]).
        positions: true positions, one per row of the storage.
        starts, lengths: one number per kv head.
        columns: float32 numbers by name, one per row of the storage; what a policy has the cache
            remember of every entry.
        scalars: float32 numbers [K] by name.
        places: what positions the keys are turned to, one per row of the storage; empty where they
            are turned to their true ones.
        grades: precision of each row, 0 the finest; empty where all have that.
    """

    keys: Float[Tensor, "C D"]
    values: Float[Tensor, "C D"]
    positions: Int[Tensor, " C"]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    columns: Mapping[str, Float[Tensor, " C"]] = field(default_factory=dict[str, Tensor])
    scalars: Mapping[str, Float[Tensor, " K"]] = field(default_factory=dict[str, Tensor])
    places: Int[Tensor, " _"] = field(default_factory=lambda: empty_tensor(torch.int32, 0))
    grades: Int8[Tensor, " G"] = field(default_factory=lambda: empty_tensor(torch.int8, 0))

    @property
    def effective_rope_positions(self) -> Int[Tensor, " C"]:
        """The position that each row's key is turned to."""
        return self.places if len(self.places) else self.positions

    @property
    def empty_like(self) -> Float[Tensor, "0 D"]:
        """No entry; of the keys' size, type and device."""
        return self.keys[:0]

    def with_columns(self, columns: Mapping[str, Float[Tensor, " C"]]) -> Entries:
        """The same with new numbers in some columns."""
        return replace(self, columns={**self.columns, **columns})

    @cached_property
    def layout(self) -> tuple[Int64[Tensor, " K"], Int64[Tensor, " K"]]:
        """Starts and lengths in host memory, as kernels take them."""
        return torch.tensor(self.starts), torch.tensor(self.lengths)

    @cached_property
    def _cuts(self) -> list[int]:
        """Lengths that cut the storage into slack and heads, in turn; none where heads overlap."""
        edges = [0]
        for start, length in zip(self.starts, self.lengths, strict=True):
            edges += [start, start + length]
        edges.append(len(self.positions))
        cuts = [stop - start for start, stop in pairwise(edges)]
        return cuts if min(cuts) >= 0 else []

    def rows(self, head: int) -> slice:
        """Where a head's entries lie in the storage."""
        return slice(self.starts[head], self.starts[head] + self.lengths[head])

    def head_keys(self, head: int) -> Float[Tensor, "S D"]:
        return self.keys[self.rows(head)]

    def head_values(self, head: int) -> Float[Tensor, "S D"]:
        return self.values[self.rows(head)]

    def keys_from(self, head: int, first: int) -> Float[Tensor, "S D"]:
        """Keys of a head's entries from one on."""
        return self.head_keys(head)[first:]

    def values_from(self, head: int, first: int) -> Float[Tensor, "S D"]:
        """Values of a head's entries from one on."""
        return self.head_values(head)[first:]

    def gather(
        self, rows: Int64[Tensor, " M"], keys: Float[Tensor, "M D"], values: Float[Tensor, "M D"]
    ) -> None:
        """Write keys and values of some rows of the storage, on the host, where they are wanted."""
        torch.index_select(self.keys, 0, rows, out=keys)
        torch.index_select(self.values, 0, rows, out=values)

    def page_versions(
        self, versions: Int64[Tensor, "N P"], members: Int64[Tensor, "N P S"]
    ) -> Int64[Tensor, "N P"]:
        """Versions of pages, which tell in what form their members are held as well."""
        del members
        return versions

    def head_positions(self, head: int) -> Int[Tensor, " S"]:
        return self.positions[self.rows(head)]

    def position_range(self, start: int, stop: int) -> Entries:
        """The entries at positions [start, stop), as views into the same storage."""
        starts: list[int] = []
        lengths: list[int] = []
        for head in range(len(self.lengths)):
            edges = torch.tensor([start, stop], device=self.positions.device)
            found = torch.searchsorted(self.head_positions(head).long(), edges)
            low, high = int(found[0]), int(found[1])
            starts.append(self.starts[head] + low)
            lengths.append(high - low)
        return replace(self, starts=tuple(starts), lengths=tuple(lengths))

    @cached_property
    def _packed_positions(self) -> Int[Tensor, " T"]:
        return self.pack(self.positions)

    def packed_positions(self) -> Int[Tensor, " T"]:
        """Positions of all entries, head by head, without the slack between them; to be read."""
        return self._packed_positions

    def column(self, name: str) -> Packed:
        """What a column holds, packed."""
        return self.pack(self.columns[name])

    def pack(self, stored: Shaped[Tensor, "C *rest"]) -> Shaped[Tensor, "T *rest"]:
        """Rows of entries only, head by head, out of something with a row per row of storage."""
        if stored.dim() == 1 and stored.device.type == "cpu" and stored.dtype in NUMPY_DTYPES:
            numbers = stored.detach().numpy()
            parts = [numbers[self.rows(head)] for head in range(len(self.lengths))]
            return torch.from_numpy(np.concatenate(parts))  # pyright: ignore
        if self._cuts:
            return torch.cat(stored.split_with_sizes(self._cuts)[1::2])
        return torch.cat([stored[self.rows(head)] for head in range(len(self.lengths))])

    def unpack(self, packed: Packed) -> Float[Tensor, " C"]:
        """Packed numbers back in their rows of the storage; 0 in the slack."""
        stored = packed.new_zeros(len(self.positions))
        for head, part in enumerate(torch.split(packed, list(self.lengths))):
            stored[self.rows(head)] = part
        return stored


class Phase(Enum):
    """What is going on when a layer is judged."""

    PREFILL = "reading"
    DECODE = "generating"


@dataclass(frozen=True)
class Observation:
    """One layer at the moment of judgement.

    Args:
        layer: its shape.
        entries: what it has cached, the newest block included, scratch tokens excluded.
        queries: post-RoPE queries of the block (append pass) or of the scratch prompt.
        query_positions: their true positions.
        length: true tokens read so far.
        span: positions [start, stop) that this pass speaks for.
        ids: the tokens of the pass, one per query.
        keys: post-RoPE keys of the same tokens; those of a scratch pass are in no cache.
        logits: what attention to the stored rows took from a single query, biases included, row r
            for query head r of each kv head; None where it was not kept.
        stage: whether a context is read or text generated.
        facts: what was measured of this layer.
        lexicon: the sets of token ids that the policy asks for.
        places: what positions queries and `keys` are turned to, for each kv head; empty where they
            are turned to their true ones.
        states: hidden states of the tokens as they entered attention; empty where nobody asks.
        projection: the matrix that takes each query head's output to the layer's; None where nobody
            asks.
        latest: queries of the last tokens before the pass; None where nobody asks, or there were
            none.
    """

    layer: LayerSpec
    entries: Entries
    queries: Float[Tensor, "H Q D"]
    query_positions: Int[Tensor, " Q"]
    length: int
    span: tuple[int, int]
    ids: tuple[int, ...] = ()
    stage: Phase = Phase.PREFILL
    keys: Float[Tensor, "K Q D"] = field(
        default_factory=lambda: empty_tensor(torch.float32, 0, 0, 0)
    )
    logits: Float[Tensor, "R C"] | None = None
    facts: Calibration = field(default_factory=dict[str, tuple[float, ...]])
    lexicon: Lexicon = field(default_factory=dict[str, frozenset[int]])
    places: Int[Tensor, "_ _"] = field(default_factory=lambda: empty_tensor(torch.int64, 0, 0))
    states: Float[Tensor, "_ _"] = field(default_factory=lambda: empty_tensor(torch.float32, 0, 0))
    projection: Float[Tensor, "H D N"] | None = None
    latest: LatestQueries | None = None

    @property
    def effective_rope_positions(self) -> Int[Tensor, "K Q"]:
        """The position that each query is turned to, for each kv head."""
        if self.places.numel():
            return self.places
        return self.query_positions.expand(self.layer.kv_heads, -1)


@dataclass(frozen=True)
class LayerScores:
    """A layer's judgement: higher scores stay longer, protected entries stay always.

    Args:
        measure: what the budget measured of this layer; empty where it measures nothing.
        scalars: what the cache remembers of each kv head, by name.
        stage: whether a context is read or text generated.
        storage_statistics: what the storage found out about the layer.
        weights: how much each kv head counts for the budget; empty where it tells no heads apart.
        protection: what is protected if the layer keeps so many entries per head; None: the same.
    """

    scores: Packed
    protected: PackedMask
    lengths: tuple[int, ...]
    measure: tuple[float, ...] = ()
    scalars: Mapping[str, Float[Tensor, " K"]] = field(default_factory=dict[str, Tensor])
    stage: Phase = Phase.PREFILL
    storage_statistics: StorageStatistics = field(default_factory=StorageStatistics)
    weights: tuple[float, ...] = ()
    protection: Callable[[int], PackedMask] | None = None

    def ranked(self) -> Packed:
        """Scores with the protected entries above all others."""
        return self.scores.masked_fill(self.protected, torch.inf)

    def after_plan(self, plan: Plan) -> LayerScores:
        """The same judgement of those entries that a plan kept."""
        kept = plan.kept
        return replace(
            self,
            scores=self.scores[kept],
            protected=self.protected[kept],
            lengths=plan.lengths,
            storage_statistics=self.storage_statistics.after_plan(plan),
            protection=None,
        )


@dataclass(frozen=True)
class ScratchPrompt:
    """A token sequence to be read behind the cache, only to see what it looks at.

    Args:
        ids: its tokens.
        span: positions [start, stop) of the cache that it speaks for.
        drafts: tokens that the model itself says behind `ids`, the likeliest each time, and that
            are read with them.
        shift: how much later than right behind the cache it is read, in positions; below 0 earlier.
    """

    ids: tuple[int, ...]
    span: tuple[int, int]
    drafts: int = 0
    shift: int = 0

    @property
    def tokens(self) -> int:
        """How many are read behind the cache."""
        return len(self.ids) + self.drafts


# Names of prompts to token ids: "episode", "repeat", "summarize", "question", ...
Prompts = Mapping[str, Sequence[int]]


class Need(Enum):
    """Something that costs memory or a hook, so that it is there only where it is asked for.

    STATES: the hidden states that entered attention (`Seen.states`), while a context is read.
    TEXT: all queries of a context at once, where it is read in one piece anyway: `whole()` then
        does so, however long it is.
    """

    STATES = "states"
    TEXT = "text"


@dataclass(frozen=True)
class LatestQueries:
    """Post-RoPE queries of the last tokens that a layer read, oldest first.

    Args:
        positions: their true positions.
    """

    queries: Float[Tensor, "H N D"]
    positions: Int[Tensor, " N"]

    @staticmethod
    def of(queries: Queries, positions: Positions) -> LatestQueries:
        """Those of a pass, by reference."""
        return LatestQueries(queries, positions)

    def extended(self, later: LatestQueries) -> LatestQueries:
        """These, then later ones."""
        queries = torch.cat([self.queries, later.queries.to(self.queries)], 1)
        return LatestQueries(queries, torch.cat([self.positions, later.positions]))

    def last(self, count: int) -> LatestQueries:
        """The last so many, or all where there are fewer."""
        first = max(0, len(self.positions) - count)
        return LatestQueries(self.queries[:, first:], self.positions[first:])

    def before(self, position: int) -> LatestQueries:
        """Those of tokens at earlier true positions."""
        count = int((self.positions < position).sum())
        return LatestQueries(self.queries[:, :count], self.positions[:count])

    def clone(self) -> LatestQueries:
        """The same on tensors of its own."""
        return LatestQueries(self.queries.clone(), self.positions.clone())

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors, with what they are views of."""
        held = (self.queries, self.positions)
        return sum(tensor.untyped_storage().nbytes() for tensor in held)
