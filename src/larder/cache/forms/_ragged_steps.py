"""Decode steps over ragged storage, and evictions behind them, in calls for many layers at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.entry_columns import EntryColumns
from larder.cache.forms.base import CacheLayer
from larder.cache.shared_storage import SegmentedLayer
from larder.cache.spec import LayerOptions
from larder.core.part import LOG_COUNT
from larder.core.plan import StepMerging, StepRule, StepSpreading
from larder.core.spec import LayerSpec
from larder.ops.cpu.decode_attention import EvictionStorage, StepStorage

if TYPE_CHECKING:
    from larder.cache.step_tables import StepTables

GROWTH_TOKENS = 64  # slack allocated when a caller appends without a reservation
# Of which one is replaced whenever the storage of a layer or its layout is.
_FIXED = attrgetter("_keys", "_columns", "_columns.values", "_starts", "_lengths", "_holders")


class RaggedSteps(SegmentedLayer):
    """Base of `RaggedLayer`: flat storage with a region of rows per kv head."""

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        device, ledger = options.device, options.spec.ledger
        nothing = torch.empty(0, layer.head_dim, dtype=options.dtype, device=device)
        super().__init__(layer)
        self.options = options
        self._keys, self._values = nothing, nothing if layer.latent_rank else nothing.clone()
        self._positions = torch.empty(0, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(layer.kv_heads, dtype=torch.int64)
        self._starts = torch.zeros(layer.kv_heads, dtype=torch.int64)
        self._columns = EntryColumns(ledger, layer.kv_heads, device)
        self._edges = (0,) * (layer.kv_heads + 1)
        self._room = 0
        self._records_logits = False
        self._logits: Tensor | None = None

    @abstractmethod
    def _make_room(self, count: int) -> None:
        """Ensure slack for `count` entries in every head; new storage has some to spare."""

    @abstractmethod
    def _set_lengths(self, lengths: Int64[Tensor, " K"]) -> None:
        """Replace the lengths, and count the entries."""

    def record_logits(self) -> None:
        self._records_logits = True

    def take_logits(self) -> Float[Tensor, "R C"] | None:
        logits = self._logits
        self.hold_logits(None)
        return logits

    def step_storage(self) -> StepStorage | None:
        if self.layer.latent_rank or self.layer.softcap is not None:
            return None
        self.replaced_bytes = 0
        self.hold_logits(None)
        if self._records_logits:  # for tallies, which change columns
            self._unshare(GROWTH_TOKENS)
        self._make_room(1)
        logits = self._step_logits(self.layer.query_heads // self.layer.kv_heads)
        segments = self._step_segments(self._bias_column)
        return self.step_row()._replace(logits=logits, segments=segments)

    def step_row(self) -> StepStorage:
        """Own storage of a decode step, without logits."""
        columns, layout = self._columns.values, (self._starts, self._lengths)
        stored = self._keys, self._values, self._positions
        return StepStorage(*stored, columns, *layout, self._bias_of(columns), None)

    def count_step(self, position: int) -> None:
        self._set_lengths(self._lengths + 1)
        self._room -= 1

    @property
    def can_lay_out(self) -> bool:
        return not (self.layer.latent_rank or self.layer.softcap is not None)

    def step_tables(self, layers: Sequence[CacheLayer], position: int) -> StepTables | None:
        from larder.cache.step_layout import StepLayout  # dense forms have other tables

        del position
        return StepLayout.of(layers)

    @staticmethod
    def fixed_storages(layers: Sequence[RaggedSteps]) -> list[object]:
        """Objects of which one is replaced whenever the storage of a layer or its layout is.

        Empty where others hold the storage of one. A decode step asks for those of all layers.
        """
        for layer in layers:
            if layer._segments or layer._holders.are_many:  # `_is_shared`, without its call
                return []
        return list(chain.from_iterable(map(_FIXED, layers)))

    def start_layout(self) -> int:
        """Make room for a decode step, give starts and lengths, which a `StepLayout` changes in
        place, to no other owner, and return the least slack behind a head."""
        self.replaced_bytes = 0
        self.hold_logits(None)
        self._make_room(1)
        self._starts, self._lengths = self._starts.clone(), self._lengths.clone()
        return self._room

    @property
    def records_logits(self) -> bool:
        """True if the logits of the next decode step are to be recorded."""
        return self._records_logits

    def takes_records(self) -> bool:
        """True if the logits of the next decode step are to be recorded; told once."""
        records, self._records_logits = self._records_logits, False
        return records

    @staticmethod
    def rooms_of(layers: Sequence[RaggedSteps]) -> list[int]:
        """Least slack behind a head of each layer."""
        return [layer._room for layer in layers]

    @staticmethod
    def set_rooms(layers: Sequence[RaggedSteps], rooms: Sequence[int]) -> None:
        """Set the least slack behind a head of each layer, after kernels changed it."""
        for layer, room in zip(layers, rooms, strict=True):
            layer._room = room

    def eviction_storage(self, rule: StepRule) -> EvictionStorage | None:
        from larder.ops.cpu.decode_eviction import supports  # few policies evict so

        names, logits = self._columns.ledger.columns, self._logits
        stored = self._keys, self._values, self._columns.values
        if logits is None and rule.uses_attention:
            return None
        if self.layer.sinks or self.layer.latent_rank or self._is_shared:
            return None
        if not supports(rule, *stored):
            return None
        merging = rule.merging
        is_merging = isinstance(merging, StepMerging)
        return EvictionStorage(
            self._keys,
            self._values,
            self._positions,
            self._starts,
            self._lengths,
            self._edges,
            self._columns.values,
            updated={column: names.index(name) for column, name in rule.columns.items()},
            joined=names.index(merging.column) if isinstance(merging, StepSpreading) else None,
            log_counts=names.index(LOG_COUNT) if is_merging else None,
            thresholds=self._columns.scalars_by_name[merging.scalar] if is_merging else None,
            logits=logits,
        )

    def count_eviction(self, room: int) -> None:
        self.replaced_bytes, self._room = 0, room
        self.hold_logits(None)
        self._set_lengths(self._lengths)

    @property
    def _bias_column(self) -> int | None:
        """Index of the column with biases of attention; None without one."""
        names = self._columns.ledger.columns
        return names.index(LOG_COUNT) if LOG_COUNT in names else None

    def _bias_of(self, columns: Float[Tensor, "n C"]) -> Float[Tensor, " C"] | None:
        index = self._bias_column
        return None if index is None else columns[index]

    def _step_logits(self, group_len: int) -> Tensor | None:
        """Buffer for the logits of a decode step, if they are recorded."""
        logits = None
        if self._records_logits:
            self._records_logits = False
            logits = torch.empty(group_len, len(self._keys), device=self._keys.device)
        self.hold_logits(logits)
        return logits

    def hold_logits(self, logits: Tensor | None) -> None:
        """Hold the logits of a decode step, or none."""
        former, self._logits = self._logits, logits
        if former is not logits:
            coming = 0 if logits is None else logits.untyped_storage().nbytes()
            going = 0 if former is None else former.untyped_storage().nbytes()
            self.usage.add_bytes(coming - going, self.counts_as_device)
