"""Slow tier: offloaded entries of one layer, in host memory, numbered by arrival.

    keys   [ head 0 entries | slack | head 1 entries | slack | ... ]      one row an entry

An entry never moves within its head, so an index can refer to it by number. Heads may hold
different numbers of entries. The storage is page-locked if the model runs on an accelerator.

A fork uses the same storage (see `StorageOwners`). The first of a tier and its forks that grows
uses the slack, some of which is therefore never freed; another one that grows while the first one
lives allocates its own storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from larder.cache.forms.base import AttentionCall
from larder.cache.memory_usage import TensorOwner
from larder.cache.offload.host_memory import HostMemoryBudget
from larder.cache.spec import saved_spec_text
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.recall import OffloadSpec
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.types import Queries
from larder.ops.attention import ragged_attention
from larder.ops.cpu.decode_attention import StepSegment
from larder.ops.packing import heads_of_packed, packed_rows, starts_of, storage_rows

MAX_ROWS = 1 << 14  # rows moved to an accelerator at once
GROWTH_ENTRIES = 256  # least slack of a head after its storage grows
GROWTH_SHARE = 8  # slack after growth: one row for so many entries
SPARE_SHARES = 2  # times that slack, above which `compact` frees some


@dataclass(frozen=True)
class OffloadBatch:
    """Entries on their way to the slow tier, packed head by head.

    Args:
        columns: ledger columns, a row per column.
        lengths: entries of each kv head.
    """

    keys: Float[Tensor, "T D"]
    values: Float[Tensor, "T D"]
    positions: Int[Tensor, " T"]
    columns: Float[Tensor, "n T"]
    lengths: Int64[Tensor, " K"]

    @staticmethod
    def of(entries: Entries, rejected: Int64[Tensor, " G"]) -> OffloadBatch:
        """Batch of the entries with packed indices `rejected`."""
        lengths = torch.bincount(
            heads_of_packed(rejected, entries.lengths), minlength=len(entries.lengths)
        )
        rows = storage_rows(rejected, *entries.layout).to(entries.keys.device)
        columns = [column[rows] for column in entries.columns.values()]
        stacked = torch.stack(columns) if columns else entries.keys.new_empty(0, len(rows)).float()
        return OffloadBatch(
            entries.keys[rows], entries.values[rows], entries.positions[rows], stacked, lengths
        )


def rejected_entries(plan: Plan, num_entries: int) -> Int64[Tensor, " G"]:
    """Packed indices, of `num_entries` entries, that a plan does not keep."""
    stays = torch.zeros(num_entries, dtype=torch.bool)
    stays[plan.kept.cpu()] = True
    return torch.nonzero(~stays).flatten()


class SlowTier(TensorOwner):
    """Offloaded entries of one layer.

    Args:
        columns: names of the ledger columns.
        is_pinned: page-locked storage.
    """

    counts_as_device = False

    def __init__(
        self, layer: LayerSpec, dtype: torch.dtype, columns: tuple[str, ...], is_pinned: bool
    ) -> None:
        super().__init__()
        self.layer, self.room = layer, HostMemoryBudget()
        self.replaced_bytes = 0
        self._names, self._is_pinned = columns, is_pinned
        self._keys = torch.empty(0, layer.head_dim, dtype=dtype)
        self._values = self._keys.clone()
        self._positions = torch.empty(0, dtype=torch.int32)
        self._columns = torch.empty(len(columns), 0)
        self._starts = torch.zeros(layer.kv_heads, dtype=torch.int64)
        self._lengths, self._slack = self._starts.clone(), self._starts.clone()
        self._owners = StorageOwners(self, self.lengths)
        self._count_bytes()

    def __len__(self) -> int:
        return int(self._lengths.sum())

    def add(self, batch: OffloadBatch, index_bytes: int = 0) -> None:
        """Append entries; they get the next numbers of their heads.

        Args:
            index_bytes: estimated growth of the index over them.

        Raises:
            BudgetError: the host memory budget would be exceeded; nothing has changed.
        """
        self.replaced_bytes = 0
        more = self._lengths + batch.lengths
        ends, is_full = tuple(more.tolist()), bool((batch.lengths > self._slack).any())
        if is_full or not self._owners.claim(self, ends):
            self._grow(batch.lengths, index_bytes)
            self._owners.claim(self, ends)
        else:
            self.room.check(0, index_bytes)
        rows = packed_rows(self._starts + self._lengths, batch.lengths)
        self._keys[rows] = batch.keys.to("cpu")
        self._values[rows] = batch.values.to("cpu")
        self._positions[rows] = batch.positions.to("cpu", torch.int32)
        self._columns[:, rows] = batch.columns.to("cpu")
        self._lengths = more
        self._slack = self._slack - batch.lengths

    def undo_add(self, lengths: Int64[Tensor, " K"]) -> None:
        """Remove the last `lengths` entries of each head."""
        self._lengths, self._slack = self._lengths - lengths, self._slack + lengths

    def entries(self) -> Entries:
        """All entries as views, in order of their numbers."""
        return Entries(
            self._keys,
            self._values,
            self._positions,
            tuple(self._starts.tolist()),
            tuple(self._lengths.tolist()),
            dict(zip(self._names, self._columns, strict=True)),
        )

    def without_range(self, start: int, stop: int | None = None) -> SlowTier | None:
        """New tier without the entries at positions [start, stop), renumbered in the same order.

        None if no entry lies in the range.

        Args:
            stop: None for all from `start` on.
        """
        stays = self._staying(start, stop)
        if bool(stays.all()):
            return None
        rest = self._like()
        rest.room = self.room
        self._copy_into(rest, stays)
        return rest

    def fork(self) -> SlowTier:
        """Independent tier on the same storage, copied on write."""
        copy = self._like()
        copy._keys, copy._values = self._keys, self._values
        copy._positions, copy._columns = self._positions, self._columns
        copy._starts, copy._lengths, copy._slack = self._starts, self._lengths, self._slack
        copy._owners = self._owners
        copy._count_bytes()
        copy._owners.join(copy, copy.lengths)
        return copy

    def attention_calls(self, queries: Queries) -> Iterator[AttentionCall]:
        """Attention of several queries to all entries, in chunks on an accelerator."""
        if queries.device.type != "cpu":
            yield from self._chunk_calls(queries, self.layer)
            return
        rows, layer = (self._keys, self._values, self._starts, self._lengths), self.layer
        yield partial(ragged_attention, queries, *rows, layer.scaling, softcap=layer.softcap)

    def _chunk_calls(self, queries: Queries, layer: LayerSpec) -> Iterator[AttentionCall]:
        """Attention to chunks of all entries, copied to the queries' device."""
        held = self.entries()
        starts, lengths = held.layout
        piece = max(1, MAX_ROWS // layer.kv_heads)
        for first in range(0, max(held.lengths), piece):
            counts = (lengths - first).clamp(0, piece)
            rows = storage_rows(torch.arange(int(counts.sum())), starts + first, counts)
            sides = torch.empty(2, len(rows), layer.head_dim, dtype=self._keys.dtype)
            held.gather(rows, sides[0], sides[1])
            keys, values = sides.to(queries.device)
            layout = starts_of(counts), counts, layer.scaling
            yield partial(ragged_attention, queries, keys, values, *layout, softcap=layer.softcap)

    def step_segment(self) -> StepSegment:
        """All entries as the kernel of decode steps takes them."""
        return StepSegment(self._keys, self._values, self._starts, self._lengths, None)

    def _staying(self, start: int, stop: int | None) -> Bool[Tensor, " T"]:
        """Mask of the packed entries outside positions [start, stop)."""
        positions = self._positions[packed_rows(self._starts, self._lengths)]
        stays = positions < start
        return stays if stop is None else stays | (positions >= stop)

    def _copy_into(self, other: SlowTier, chosen: Bool[Tensor, " T"]) -> None:
        """Copy the packed entries of a mask into another tier, which is empty."""
        rows, heads = self._packed(chosen)
        lengths = torch.bincount(heads, minlength=len(self._lengths))
        sides = {"keys": self._keys, "values": self._values, "positions": self._positions}
        state = {name: tensor[rows] for name, tensor in sides.items()}
        other.adopt(state | {"columns": self._columns[:, rows], "lengths": lengths})

    def _packed(
        self, chosen: Bool[Tensor, " T"]
    ) -> tuple[Int64[Tensor, " N"], Int64[Tensor, " N"]]:
        """Storage row and head of each packed entry of a mask."""
        heads = torch.repeat_interleave(torch.arange(len(self._lengths)), self._lengths)
        return packed_rows(self._starts, self._lengths)[chosen], heads[chosen]

    def _like(self) -> SlowTier:
        """Empty tier of the same type and options."""
        return SlowTier(self.layer, self._keys.dtype, self._names, self._is_pinned)

    def compact(self) -> None:
        """Free slack beyond the growth reserve, if that is worth a copy."""
        spare = self._lengths // GROWTH_SHARE
        if int(self._slack.sum()) > SPARE_SHARES * int(spare.sum()):
            rows = packed_rows(self._starts, self._lengths)
            self._lay_out(rows, self._lengths, torch.minimum(self._slack, spare))

    def state(self) -> dict[str, Tensor]:
        """Tensors by name, without slack."""
        rows = packed_rows(self._starts, self._lengths)
        sides = {"keys": self._keys, "values": self._values, "positions": self._positions}
        held = {name: tensor[rows] for name, tensor in sides.items()}
        return held | {"columns": self._columns[:, rows], "lengths": self._lengths.clone()}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        """Take ownership of the tensors of `state`."""
        self._keys, self._values = state["keys"], state["values"]
        self._positions, self._columns = state["positions"], state["columns"]
        self._lengths = state["lengths"]
        self._starts = starts_of(self._lengths)
        self._slack = torch.zeros_like(self._lengths)
        self._owners.leave(self)
        self._owners = StorageOwners(self, self.lengths)
        self._count_bytes()

    def own_tensors(self) -> tuple[Tensor, ...]:
        tables = self._keys, self._values, self._positions, self._columns
        return *tables, self._starts, self._lengths, self._slack

    @property
    def shared_nbytes(self) -> int:
        """Bytes shared with forks of this tier or with the tier it was forked from."""
        return self.nbytes if self._owners.is_shared else 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Entries of each kv head."""
        return tuple(self._lengths.tolist())

    def _grow(self, more: Int64[Tensor, " K"], index_bytes: int) -> None:
        """Relocate into storage with slack for `more` entries and for later growth."""
        rooms = more + (self._lengths // GROWTH_SHARE).clamp(min=GROWTH_ENTRIES)
        rows = packed_rows(self._starts, self._lengths)
        total = int((self._lengths + rooms).sum())
        grown = (total - len(self._keys)) * self._entry_bytes
        self.room.check(grown, index_bytes, self.nbytes)
        self._lay_out(rows, self._lengths, rooms)

    @property
    def _entry_bytes(self) -> int:
        numbers = 2 * self.layer.head_dim * self._keys.itemsize
        return numbers + POSITION_BYTES + 4 * len(self._names)

    def _lay_out(
        self, rows: Int64[Tensor, " T"], lengths: Int64[Tensor, " K"], rooms: Int64[Tensor, " K"]
    ) -> None:
        """Move the given rows, packed head by head, into new storage."""
        starts = starts_of(lengths + rooms)
        total = int((lengths + rooms).sum())
        into = packed_rows(starts, lengths)
        fresh = [self._fresh(held, total) for held in (self._keys, self._values, self._positions)]
        columns = self._columns.new_zeros(len(self._names), total)
        for held, new in zip((self._keys, self._values, self._positions), fresh, strict=True):
            new[into] = held[rows]
        columns[:, into] = self._columns[:, rows]
        self.replaced_bytes = self.nbytes
        self._keys, self._values, self._positions = fresh
        self._columns = columns
        self._starts, self._lengths, self._slack = starts, lengths.clone(), rooms.clone()
        self._owners.leave(self)
        self._owners = StorageOwners(self, self.lengths)
        self._count_bytes()

    def _fresh(self, held: Tensor, total: int) -> Tensor:
        return torch.empty(total, *held.shape[1:], dtype=held.dtype, pin_memory=self._is_pinned)


Lengths = tuple[int, ...]


class StorageOwners:
    """Owners of one storage (copy-on-write), by weak reference. Thread-safe."""

    def __init__(self, first: object, lengths: Lengths) -> None:
        self._lock = Lock()
        self._lengths: WeakKeyDictionary[object, Lengths] = WeakKeyDictionary({first: lengths})

    def join(self, owner: object, lengths: Lengths) -> None:
        """Register an owner of the first `lengths` entries of each head."""
        with self._lock:
            self._lengths[owner] = lengths

    def leave(self, owner: object) -> None:
        """Unregister an owner."""
        with self._lock:
            self._lengths.pop(owner, None)

    def claim(self, owner: object, lengths: Lengths) -> bool:
        """Claim the rows up to `lengths` for one owner; False if another owner uses any of them."""
        with self._lock:
            own = self._lengths[owner]
            others = [each for other, each in self._lengths.items() if other is not owner]
            grows = [head for head, length in enumerate(lengths) if length > own[head]]
            if any(each[head] > own[head] for each in others for head in grows):
                return False
            self._lengths[owner] = tuple(map(max, own, lengths))
            return True

    @property
    def is_shared(self) -> bool:
        """True if the storage has several owners."""
        return len(self._lengths) > 1


SLOW, INDEX, PARKING, OBSERVED = "slow.", "index.", "parking", "observed"  # names in a state


def saved_offload_spec(state: Mapping[str, Tensor], layer: LayerSpec) -> OffloadSpec:
    """Offload spec of a saved layer.

    Raises:
        CacheError: the saved layer has no slow tier.
    """
    return OffloadSpec.from_text(saved_spec_text(state, PARKING, layer, "offload"))
