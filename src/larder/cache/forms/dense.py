"""Dense layer: all heads hold the same positions, in preallocated storage.

    keys   [ head 0: entries, slack | head 1: entries, slack | ... ]      [K, C, D]

One row of positions serves all heads, so a plan must keep the same entries in each. Latents (MLA)
are keys and values at once: both names refer to one storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from jaxtyping import Int64
from torch import Tensor

from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.memory_usage import MemoryUsage
from larder.cache.new_tokens import NewTokens
from larder.cache.shared_storage import SegmentedLayer, SharedSegment, StorageHolders
from larder.cache.spec import LayerOptions
from larder.cache.validation import check_kept, check_single_precision, tokens_kept
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerSpec
from larder.core.types import Keys, Positions, Values
from larder.ops.attention import ragged_attention
from larder.ops.block_attention import BlockAttention
from larder.ops.cpu.decode_attention import StepStorage, supports_step
from larder.ops.removal import remove_rows

if TYPE_CHECKING:
    from larder.cache.step_tables import StepTables

GROWTH = 4  # storage grows by a quarter when a caller appends without a reservation
MIN_GROWTH_TOKENS = 64


class DenseLayer(SegmentedLayer):
    """Layer storage with the same entries in every head."""

    supports = frozenset[str]()
    holds_latents = True
    can_page = True
    always_has_tables = True
    divides: ClassVar[bool] = True  # whether a prefix can be storage of its own

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        shape, device = (layer.kv_heads, 0, layer.head_dim), options.device
        super().__init__(layer)
        self.options = options
        self._keys = torch.empty(shape, dtype=options.dtype, device=device)
        self._values = self._keys if layer.latent_rank else torch.empty_like(self._keys)
        self._positions = torch.empty(0, dtype=torch.int32, device=device)
        self._length = 0
        self._flat_rows: tuple[Tensor, ...] = ()  # keys, values and no columns, for decode steps
        self.storage_mark = object()  # another one after every change but that of `count_steps`
        self._count_bytes()

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        count, self.replaced_bytes = keys.shape[1], 0
        if count == 1:  # attention to several storages would copy them at each step
            self._unshare(MIN_GROWTH_TOKENS)
        self._make_room(count)
        start, stop = self._length, self._length + count
        self._keys[:, start:stop] = keys
        if not self.layer.latent_rank:
            self._values[:, start:stop] = values
        self._positions[start:stop] = positions
        self._set_length(stop)

    def step_storage(self) -> StepStorage | None:
        if self.layer.latent_rank or self.layer.softcap is not None:
            return None
        self.replaced_bytes = 0
        self._make_room(1)
        if not self._flat_rows:
            flat = (side.view(-1, self.layer.head_dim) for side in (self._keys, self._values))
            self._flat_rows = *flat, self._keys.new_empty(0)
        keys, values, columns = self._flat_rows
        heads, segments = self.layer.kv_heads, self._step_segments()
        layout = _head_starts(heads, self._capacity), torch.full((heads,), self._length)
        return StepStorage(keys, values, None, columns, *layout, None, None, segments)

    def count_step(self, position: int) -> None:
        self._positions[self._length] = position
        self._set_length(self._length + 1)

    @property
    def can_lay_out(self) -> bool:
        return self.divides and not (self.layer.latent_rank or self.layer.softcap is not None)

    def step_tables(self, layers: Sequence[CacheLayer], position: int) -> StepTables:
        from larder.cache.step_tables import DenseStepTables  # not before it is needed

        return DenseStepTables(cast("Sequence[DenseLayer]", layers), position)

    def start_steps(self, position: int) -> StepStorage:
        """Storage for decode steps of tokens at consecutive positions, which are written into the
        slack.

        Args:
            position: of the first token.
        """
        storage, first = self.step_storage(), self._length
        assert storage is not None, "callers ask can_lay_out first"
        coming = torch.arange(position, position + self.room, dtype=torch.int32)
        self._positions[first:] = coming.to(self._positions.device)
        return storage

    @property
    def storages(self) -> tuple[object, ...]:
        """Keys and values of the own storage, and the segments in front of it."""
        return (self._keys, self._values, *self._segments)

    @property
    def room(self) -> int:
        """Entries that the storage has slack for."""
        return self._capacity - self._length

    @staticmethod
    def count_steps(layers: Sequence[DenseLayer], count: int) -> None:
        """Count tokens in each layer, which a kernel has written behind `start_steps`."""
        for layer in layers:
            layer._length += count
        usages = (layer.usage for layer in layers)
        MemoryUsage.add_entries_each(usages, count * layers[0].layer.kv_heads)

    def apply(self, plan: Plan) -> None:
        rows = self._chosen(plan).to(self._keys.device)
        self._unshare_segments()
        self._replace([side[:, rows] for side in self._sides], self._positions[rows])
        self._set_length(len(rows))

    def evict(self, plan: Plan) -> None:
        rows = self._chosen(plan)
        self._unshare()
        positions = self._positions[rows.to(self._positions.device)]
        flat = [side.view(-1, self.layer.head_dim) for side in self._sides]
        self.replaced_bytes = 0
        remove_rows(flat, *self._layout(), plan.kept.cpu(), plan.lengths)
        self._positions[: len(rows)] = positions
        self._set_length(len(rows))

    def allocate(self, room: int) -> None:
        self._start_storage(room, room)
        if self._length + room > self._capacity:
            self._resize(self._length + room)

    def compact(self) -> None:
        self._compact_segments()
        if self._length < self._capacity and not self._holders.are_many:
            self._resize(self._length)

    def truncate(self, length: int) -> None:
        self._set_length(int((self._positions[: self._length] < length).sum()))
        if self._segments:
            self._cut_segments(length)
            self._drop_empty_storage()
            self._count_bytes()

    def prefix_nbytes(self, length: int) -> int:
        if not self._can_divide:
            return 0
        count = sum(int(self._lengths_before(each, length)[0]) for each in self._filled)
        row = sum(self.layer.kv_heads * side.shape[2] * side.itemsize for side in self._sides)
        return count * (row + self._positions.itemsize)

    def divide(self, length: int) -> None:
        if not self._can_divide:
            return
        self._rejoin()
        self.storage_mark = object()
        for segment in self._filled:
            count = int(self._lengths_before(segment, length)[0])
            if 0 < count < len(segment.positions):
                self._divide_storage(segment, count)

    @property
    def shared_length(self) -> int:
        if not self._can_divide:
            return 0
        return sum(int(each.lengths[0]) for each in self._filled if each.shared_bytes)

    def shared_storages(self) -> dict[object, int]:
        if not self._can_divide:
            return {}
        return {each.holders: each.stored_bytes for each in self._filled if each.shared_bytes}

    def _divide_storage(self, segment: SharedSegment, count: int) -> None:
        """Replace a storage by one of its first `count` entries and one of the others, in all
        layers that hold it.
        """
        old, is_own = segment.holders, segment.holders is self._holders
        layers = [each for each in old.holders if isinstance(each, DenseLayer)]
        for each in layers:
            each.seal()
        held = max(each._length_in(old) for each in layers)
        behind = replace(
            segment,
            keys=segment.keys[:, count:],
            values=segment.values[:, count:],
            positions=segment.positions[count:],
            lengths=torch.full_like(segment.lengths, held - count),
        )
        room = len(segment.positions) - held if is_own and not old.are_many else 0
        front = self._joined([replace(segment, lengths=torch.full_like(behind.lengths, count))], 0)
        back = self._joined([behind], room)
        for each in layers:
            each._hold_divided(old, front, back)

    def _length_in(self, holders: StorageHolders) -> int:
        """Entries of each head that this layer has in a storage."""
        parts = (*self._segments, self._storage())
        return max(int(each.lengths[0]) for each in parts if each.holders is holders)

    def _hold_divided(self, old: StorageHolders, front: SharedSegment, back: SharedSegment) -> None:
        """Hold two storages in place of one."""
        parts = list[SharedSegment]()
        for part in (*self._segments, self._storage()):
            if part.holders is not old:
                parts.append(part)
                continue
            first = int(front.lengths[0].clamp(max=part.lengths[0]))
            behind = int(part.lengths[0]) - first
            parts.append(replace(front, lengths=torch.full_like(part.lengths, first)))
            if behind or old is self._holders:
                parts.append(replace(back, lengths=torch.full_like(part.lengths, behind)))
        old.leave(self)
        for part in parts:
            part.holders.join(self, part.lengths.tolist())
        self._segments = tuple(parts[:-1])
        self._hold(parts[-1], keeps=True)

    @property
    def _can_divide(self) -> bool:
        """True if decode steps read several storages in place."""
        layer, keys = self.layer, self._keys
        if not self.divides or layer.latent_rank or layer.softcap is not None:
            return False
        queries = keys.new_empty(layer.query_heads, 0, layer.head_dim)
        return supports_step(queries, keys[:, :0], self._values[:, :0])

    def entries(self) -> Entries:
        if len(self._filled) > 1:
            self._unshare()
        held, rank = self._read_storage(), self.layer.latent_rank
        values = held.values.flatten(0, 1)
        return Entries(
            held.keys.flatten(0, 1),
            values[:, :rank] if rank else values,
            held.positions.repeat(self.layer.kv_heads),
            tuple(held.starts.tolist()),
            tuple(held.lengths.tolist()),
        )

    def state(self) -> dict[str, Tensor]:
        held = self._read_storage()
        length = int(held.lengths[0])
        sides = {"keys": held.keys} | ({} if self.layer.latent_rank else {"values": held.values})
        state = {name: side[:, :length].clone() for name, side in sides.items()}
        return {**state, "positions": held.positions[:length].clone()}

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> DenseLayer:
        store = cls(layer, LayerOptions.of_state(state))
        store._keys = state["keys"]
        store._values = store._keys if layer.latent_rank else state["values"]
        store._positions = state["positions"]
        store._count_bytes()
        store._set_length(len(store._positions))
        return store

    def own_tensors(self) -> tuple[Tensor, ...]:
        return *self._sides, self._positions, *self._segment_tensors()

    @property
    def lengths(self) -> tuple[int, ...]:
        if not self._segments:
            return (self._length,) * self.layer.kv_heads
        return self._all_lengths(self._layout()[1])

    @property
    def _sides(self) -> tuple[Tensor, ...]:
        """Keys and values, or latents."""
        return (self._keys,) if self.layer.latent_rank else (self._keys, self._values)

    @property
    def _capacity(self) -> int:
        return self._keys.shape[1]

    def _chosen(self, plan: Plan) -> Tensor:
        """Entries that a plan keeps in every head, on the host."""
        check_single_precision(plan)
        check_kept(plan, self.lengths)
        if len(plan.folds) or plan.columns or plan.scalars:
            raise CacheError(
                "A dense cache neither merges entries nor has columns, but the plan requests "
                "it: use a ragged cache."
            )
        chosen = tokens_kept(plan, self.lengths[0])
        if chosen is None:
            raise CacheError(
                "A dense cache holds the same entries in every head, but the plan keeps different "
                "ones: use a ragged cache."
            )
        return chosen

    def attention_calls(self, new: NewTokens) -> list[AttentionCall]:
        held = self._read_storage()
        rows = held.keys.flatten(0, 1), held.values.flatten(0, 1)
        layout, softcap = (held.starts, held.lengths, self.layer.scaling), self.layer.softcap
        return [partial(ragged_attention, new.queries, *rows, *layout, softcap=softcap)]

    def block_call(self, new: NewTokens) -> AttentionCall | None:
        if not self.attends_blocks(new):
            return None
        held = self._read_storage()
        return BlockAttention(
            new.queries,
            held.keys.flatten(0, 1),
            held.values.flatten(0, 1),
            held.starts,
            held.lengths,
            new_keys=new.keys,
            new_values=new.values,
            scaling=self.layer.scaling,
        )

    def _layout(self) -> tuple[Tensor, Tensor]:
        heads = torch.arange(self.layer.kv_heads)
        return heads * self._capacity, torch.full_like(heads, self._length)

    def _make_room(self, count: int) -> None:
        """Ensure storage for `count` more entries in every head, with some to spare if it grows."""
        self._start_storage(count, count + MIN_GROWTH_TOKENS)
        stop = self._length + count
        if stop > self._capacity:
            self._resize(max(stop + MIN_GROWTH_TOKENS, stop + stop // GROWTH))

    def _resize(self, capacity: int) -> None:
        length, sides = self._length, list[Tensor]()
        for side in self._sides:
            sides.append(side.new_empty(self.layer.kv_heads, capacity, self.layer.head_dim))
            sides[-1][:, :length] = side[:, :length]
        positions = self._positions.new_zeros(capacity)
        positions[:length] = self._positions[:length]
        self._replace(sides, positions)

    def _replace(self, sides: Sequence[Tensor], positions: Tensor) -> None:
        """Replace the storage by other keys and values, or latents."""
        self.replaced_bytes = self.nbytes
        self._renew_holders()
        self._keys, self._values, self._positions = sides[0], sides[-1], positions
        self._flat_rows, self.storage_mark = (), object()
        self._count_bytes()

    def _set_length(self, length: int) -> None:
        self._length, self.storage_mark = length, object()
        self.usage.set_entries(length * self.layer.kv_heads + self._segment_entries)

    def _storage(self) -> SharedSegment:
        starts, lengths = self._layout()
        edges = tuple(head * self._capacity for head in range(self.layer.kv_heads + 1))
        stored = self._keys, self._values, self._positions, self._keys.new_empty(0, self._capacity)
        return SharedSegment(*stored, starts, edges, lengths, self._holders)

    def _use(self, storage: SharedSegment) -> None:
        self._keys, self._values, self._positions = storage.keys, storage.values, storage.positions
        self._flat_rows = ()
        self._set_length(int(storage.lengths[0]))

    def _joined(self, segments: Sequence[SharedSegment], room: int) -> SharedSegment:
        length = sum(int(segment.lengths[0]) for segment in segments)
        shape = self.layer.kv_heads, length + room, self.layer.head_dim
        sides = [side.new_empty(shape) for side in self._sides]
        positions = self._positions.new_zeros(length + room)
        first = 0
        for segment in segments:
            count = int(segment.lengths[0])
            there = slice(first, first + count)
            for side, held in zip(sides, (segment.keys, segment.values), strict=False):
                side[:, there] = held[:, :count]
            positions[there] = segment.positions[:count]
            first += count
        starts = torch.arange(self.layer.kv_heads) * (length + room)
        edges = (*starts.tolist(), self.layer.kv_heads * (length + room))
        lengths, columns = torch.full_like(starts, length), self._keys.new_empty(0, length + room)
        stored = sides[0], sides[-1], positions, columns
        return SharedSegment(*stored, starts, edges, lengths, StorageHolders())

    def _lengths_before(self, segment: SharedSegment, length: int) -> Int64[Tensor, " K"]:
        held = segment.positions[: int(segment.lengths[0])]
        return torch.full_like(segment.lengths, int((held < length).sum()))

    def _like(self) -> DenseLayer:
        return type(self)(self.layer, self.options)


@lru_cache(maxsize=256)
def _head_starts(heads: int, capacity: int) -> Int64[Tensor, " K"]:
    """First row of each head, in host memory under any default device. Not to be changed."""
    return torch.arange(heads, device="cpu") * capacity


class BlendedLayer(DenseLayer):
    """Dense storage of entries that were put together from texts read apart.

    They are what CacheBlend (Yao et al., arXiv:2405.16444) makes of cached chunks: an approximation
    of the entries that the whole text would have. The form has a name of its own so that no such
    cache is ever shared as the exact cache of a prefix, also after it was saved and restored.
    """

    has_public_name = False


Part = DenseLayer
