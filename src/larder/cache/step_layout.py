"""Storage of all layers of one sequence as the kernels of decode steps take it, kept between steps.

Where no layer moved its storage, a step makes no call per layer before the kernels: the tables of
addresses stay, the kernels change starts and lengths in place, and one buffer holds the logits of
all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import call, is_
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from larder.cache.forms.base import CacheLayer
from larder.cache.step_tables import StepTables
from larder.core.types import empty_tensor
from larder.ops.cpu.decode_attention import (
    STEP_ROW,
    EvictionRows,
    can_count,
    count_entries,
    count_steps,
    fixed_rows,
)

if TYPE_CHECKING:  # few policies evict by a kernel
    from larder.cache.forms.ragged import RaggedLayer
    from larder.cache.sequence import SequenceCache
    from larder.ops.cpu.decode_eviction import EvictionTable

ITEM_BYTES = 4  # of a logit
NO_LOGITS = empty_tensor(torch.float32, 0)


class StepLayout(StepTables):
    """Tables of the layers of one sequence, valid while no layer moves its storage.

    It holds no storage alive, and logits during a step alone. A step goes `take_rows`,
    `count_step`, `evict_sequences` where a rule applies, and `settle`, which tells the layers what
    the kernels did. Where layers evict behind their attention, `prepare_evictions` comes before it,
    and `count_evicted_step` and `count_evictions` behind it.

    Args:
        layers: all layers of the sequence, which `can_lay_out`, in storage of their own. Starts and
            lengths become tensors that no other owner reads.
    """

    def __init__(self, layers: Sequence[RaggedLayer]) -> None:
        self._layers = tuple(layers)
        self._rooms = [layer.start_layout() for layer in layers]
        self._held = [ref(own) for own in layers[0].fixed_storages(layers)]
        self._rows = fixed_rows([layer.step_row() for layer in layers])
        self._groups = np.array([own.layer.query_heads // own.layer.kv_heads for own in layers])
        self._stored = self._rows[:, STEP_ROW.index("stored_rows")].copy()
        self._logits, self._offsets = NO_LOGITS, np.zeros(len(layers), int)
        self._kv_heads = layers[0].layer.kv_heads
        self._is_holding = False  # whether layers were given logits
        self._unread = set[int]()  # layers with logits that no kernel has read
        self._eviction: tuple[object, tuple[object, ...], EvictionTable] | None = None
        self._journal = NO_LOGITS  # of the present step
        self._undoable: EvictionTable | None = None  # evicted from in the present step

    @staticmethod
    def of(layers: Sequence[CacheLayer]) -> StepLayout | None:
        """Layout of layers that `can_lay_out`; None where others hold the storage of one,
        and for a library of an older version."""
        own = cast("Sequence[RaggedLayer]", layers)
        if not can_count() or not own[0].fixed_storages(own):
            return None
        return StepLayout(own)

    @property
    def dtype(self) -> torch.dtype:
        """Type of keys and values."""
        return self._layers[0].like.dtype

    @property
    def is_current(self) -> bool:
        """True while every layer has the storage of the tables, and room for one more entry."""
        if min(self._layers[0].rooms_of(self._layers)) < 1:
            return False
        present = self._layers[0].fixed_storages(self._layers)
        is_same = map(is_, map(call, self._held), present)
        return len(present) == len(self._held) and all(is_same)

    def take_rows(self) -> NDArray[np.int64]:
        """Fields of `struct step_row` by layer, with a buffer for the logits that are recorded."""
        self._rooms = self._layers[0].rooms_of(self._layers)  # plans may have evicted in place
        records = [layer.takes_records() for layer in self._layers]
        self._unread = {index for index, own in enumerate(records) if own}
        sizes = np.where(records, self._groups * self._stored, 0)
        ends = sizes.cumsum()
        self._offsets, self._logits = ends - sizes, torch.empty(int(ends[-1]))
        self._rows[:, STEP_ROW.index("logits")] = np.where(records, self._addresses, 0)
        return self._rows

    def count_step(self) -> None:
        """Count the entry that was written behind each head of every layer."""
        count_steps(self._rows, self._kv_heads)
        self.count_evicted_step()

    def count_evicted_step(self) -> None:
        self._rooms = [room - 1 for room in self._rooms]

    def eviction_table(
        self, owner: object, key: tuple[object, ...], build: Callable[[], EvictionTable | None]
    ) -> EvictionTable | None:
        """Table of the layers that a rule evicts from, kept while owner and key are the same.

        Args:
            owner: whose rule it is.
            key: what the table depends on beside the storage.
            build: makes it from layers that hold their logits; None where a layer is not served.
        """
        held = self.kept_eviction_table(owner, key)
        if held is not None:
            return held
        self._update_layers()
        table = build()
        self._eviction = None if table is None else (owner, key, table)
        return table

    def kept_eviction_table(self, owner: object, key: tuple[object, ...]) -> EvictionTable | None:
        held = self._eviction
        return held[2] if held is not None and held[0] is owner and held[1] == key else None

    def prepare_eviction(self, table: EvictionTable, length: int) -> None:
        sizes = table.journal_bytes
        ends = sizes.cumsum()
        self._journal = torch.empty(int(ends[-1]), dtype=torch.uint8)
        journals = np.where(sizes, self._journal.data_ptr() + ends - sizes, 0)
        table.set_step(length, self._addresses[table.layers], journals)
        self._undoable = table if sizes.any() else None

    def undo_eviction(self) -> bool:
        table = self._undoable
        if table is not None:
            table.undo()
            self._logits = NO_LOGITS
        self.end_step()
        return table is not None

    def end_step(self) -> None:
        self._journal, self._undoable = NO_LOGITS, None

    def count_eviction(self, table: EvictionTable, rooms: Sequence[int | None]) -> list[int]:
        """Count an eviction from the layers of a table, and return those that are done.

        Args:
            rooms: slack behind the fullest head of each layer; None where nothing changed.
        """
        found = dict(zip(table.layers, rooms, strict=True))
        done = {layer: room for layer, room in found.items() if room is not None}
        for layer, room in done.items():
            self._rooms[layer] = room
        self._unread -= done.keys()
        return list(done)

    def settle(self) -> None:
        """Count in every layer what kernels have appended and evicted, and free the logits.

        Recorded logits that no kernel has read go to their layers, as copies.
        """
        self._update_layers()
        self._logits = NO_LOGITS

    def _update_layers(self) -> None:
        """Count in every layer what kernels did so far, and give it its unread logits."""
        self._layers[0].set_rooms(self._layers, self._rooms)
        for layer, held in zip(
            self._layers, count_entries(self._rows, self._kv_heads), strict=True
        ):
            layer.usage.set_entries(held)
        if self._is_holding or self._unread:
            for index, layer in enumerate(self._layers):
                layer.hold_logits(self._logits_of(index) if index in self._unread else None)
        self._is_holding = bool(self._unread)

    @property
    def _addresses(self) -> NDArray[np.int64]:
        """Address of the logits of each layer."""
        return self._logits.data_ptr() + self._offsets * ITEM_BYTES

    def _logits_of(self, index: int) -> Tensor:
        """Copy of the logits of one layer."""
        rows, stored = int(self._groups[index]), int(self._stored[index])
        return self._logits[self._offsets[index] :][: rows * stored].view(rows, stored).clone()


class SequenceEviction(NamedTuple):
    """Eviction from layers of one sequence behind a decode step.

    Args:
        layout: of the cache.
        table: the layers, and what is evicted from them.
    """

    cache: SequenceCache
    layout: StepTables
    table: EvictionTable


def evict_sequences(evictions: Sequence[SequenceEviction]) -> list[list[int]]:
    """Evict from several sequences, each behind its newest token: one call for each rule.

    Every sequence gets the bits that it gets alone.

    Returns:
        Layers of each sequence that are done. The others have not changed.

    Raises:
        MemoryError: buffers could not be allocated; the sequences are half changed, until
            `StepTables.undo_eviction`.
    """
    from larder.ops.cpu.decode_eviction import evict_tables  # few policies evict so
    from larder.ops.removal import MIN_ROAMING_SLACK

    prepare_evictions(evictions)
    rooms = evict_tables([each.table for each in evictions], MIN_ROAMING_SLACK)
    return _count_rooms(evictions, rooms)


def prepare_evictions(evictions: Sequence[SequenceEviction]) -> None:
    """Count evictions in their caches, and set in their tables what changes at every step."""
    for cache, layout, table in evictions:
        cache.count_eviction()
        layout.prepare_eviction(table, cache.next_position + 1)


def layer_evictions(evictions: Sequence[SequenceEviction]) -> EvictionRows | None:
    """Evictions of `prepare_evictions` to be carried out behind the attention of each layer; None
    where the kernel of the layers does not."""
    from larder.ops.cpu.decode_eviction import layer_evictions  # few policies evict so
    from larder.ops.removal import MIN_ROAMING_SLACK

    num_layers = len(evictions[0].cache.layers)
    return layer_evictions([each.table for each in evictions], num_layers, MIN_ROAMING_SLACK)


def count_evictions(evictions: Sequence[SequenceEviction]) -> list[list[int]]:
    """Count evictions that were carried out behind the attention of each layer.

    Returns, raises: as `evict_sequences`.
    """
    return _count_rooms(evictions, [each.table.rooms() for each in evictions])


def _count_rooms(
    evictions: Sequence[SequenceEviction], rooms: Sequence[Sequence[int | None]]
) -> list[list[int]]:
    return [
        each.layout.count_eviction(each.table, own)
        for each, own in zip(evictions, rooms, strict=True)
    ]
