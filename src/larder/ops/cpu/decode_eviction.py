"""Eviction behind a decode step: all layers of all sequences in one call of a C kernel.

Where the layers run in one call, too, that call evicts behind the attention of each layer
(`EvictionRows`), while entries are in a cache of the processor. An eviction updates columns with
the attention of the new token, scores entries (H2O, D2O, TOVA, RoCo, StreamingLLM), rejects the
lowest of each head, merges them into kept ones where that is asked for (D2O, CaM), and closes the
gaps. It gives the same bits as the observer of the pass, which evicts layer by layer through plans
and is the form for all other policies, storages and devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from functools import cache, cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from larder.core.plan import StepColumn, StepMerging, StepRule, StepScore, StepSpreading
from larder.ops.cpu.c_library import EvictionCall, c_library
from larder.ops.cpu.decode_attention import (
    NO_CALLS,
    SUPPORTED_DTYPES,
    EvictionRows,
    EvictionStorage,
)

DONE, LEFT, FAILED = range(3)
LOGITS, JOURNAL, COUNT, STOP, ROOM, STATUS = 4, 11, -5, -3, -2, -1  # fields of `struct evicted`
STEP_SCORES = (StepScore.MASS, StepScore.LAYER_MEAN, StepScore.RAISED_MEAN, StepScore.POSITION)
SEED_BITS = (1 << 32) - 1  # all that draws depend on
LEAST_FLOATS = 1 << 15  # of keys and values per thread; for less, waking it costs more


def supports(rule: StepRule, keys: Tensor, values: Tensor, columns: Tensor) -> bool:
    """True for contiguous storage in host memory, where the C kernel was compiled."""
    return (
        keys.device.type == "cpu"
        and keys.dtype in SUPPORTED_DTYPES
        and values.dtype is keys.dtype
        and values.shape == keys.shape
        and keys.is_contiguous()
        and values.is_contiguous()
        and columns.is_contiguous()
        and c_library() is not None
        and (rule.is_accumulating or _has_rules())
    )


@cache
def _has_rules() -> bool:
    """True unless the library is of a version that evicts by accumulated attention alone."""
    return hasattr(c_library(), "larder_evict_by_rule")


def evict_step(layers: Sequence[EvictionStorage], roomy: int, rule: StepRule) -> list[int | None]:
    """Evict from layers that `supports` allows.

    Args:
        roomy: least slack at which the front of a head may move.

    Returns:
        The slack behind the fullest head of each layer; None for a layer that has not changed,
        because a score is not a number or more entries must go than the kernel rejects.

    Raises:
        MemoryError: buffers could not be allocated; layers are half changed.
    """
    return evict_tables([EvictionTable(layers, rule, range(len(layers)))], roomy)[0]


def evict_tables(tables: Sequence[EvictionTable], roomy: int) -> list[list[int | None]]:
    """Evict from the layers of several tables, in one call for each rule, as `evict_step`.

    Returns:
        What `evict_step` returns, for each table.
    """
    rooms: list[list[int | None]] = [[] for _ in tables]
    waiting = list(range(len(tables)))
    while waiting:
        rule = tables[waiting[0]].rule
        alike = [n for n in waiting if tables[n].rule == rule]
        for number, own in zip(alike, _evict_alike([tables[n] for n in alike], roomy), strict=True):
            rooms[number] = own
        waiting = [n for n in waiting if n not in alike]
    return rooms


def layer_evictions(
    tables: Sequence[EvictionTable], num_layers: int, roomy: int
) -> EvictionRows | None:
    """Evictions from several sequences, by layer; None where one call does not carry them out.

    Those from one sequence are kept with its table.

    Args:
        tables: of each sequence, prepared for the step.
        num_layers: of the model.
        roomy: least slack at which the front of a head may move.
    """
    rule = tables[0].rule
    if not rule.is_undoable or any(each.rule != rule for each in tables):
        return None
    floats = sum(each.floats for each in tables) // num_layers
    threads = min(torch.get_num_threads(), len(tables), floats // LEAST_FLOATS + 1)
    key = num_layers, roomy, threads
    if len(tables) > 1:
        return _eviction_rows(tables, *key)
    kept = tables[0].kept_rows
    if kept is None or kept[0] != key:
        kept = tables[0].kept_rows = key, _eviction_rows(tables, *key)
    return kept[1]


def _eviction_rows(
    tables: Sequence[EvictionTable], num_layers: int, roomy: int, threads: int
) -> EvictionRows:
    """Evictions from several sequences by one rule."""
    rule = tables[0].rule
    layers = np.zeros((num_layers, len(tables)), np.int64)
    columns = NO_CALLS if rule.is_accumulating else np.zeros_like(layers)
    for number, table in enumerate(tables):
        layers[table.layers, number] = _row_addresses(table.rows)
        if columns.size:
            columns[table.layers, number] = _row_addresses(table.columns)
    return EvictionRows(_eviction_call(rule, roomy, threads), layers, columns)


class EvictionTable:
    """Layers to evict from by a rule, as the C kernel takes them. It holds no storage alive.

    Args:
        storages: of each layer, which `supports` allows.
        layers: index of each layer among those of the sequence.
        spared_last: number of latest tokens that each layer spares, for `set_step`.
    """

    def __init__(
        self,
        storages: Sequence[EvictionStorage],
        rule: StepRule,
        layers: Sequence[int],
        spared_last: Sequence[int] = (),
    ) -> None:
        self.layers, self.rule = list(layers), rule
        self._spared_last = np.array(spared_last, np.int64)
        self._edges = np.array([edge for own in storages for edge in own.edges], np.int64)
        rows, address = [], self._edges.ctypes.data
        for own in storages:
            rows.append(_fields(own, address))
            address += len(own.edges) * self._edges.itemsize
        self.rows = np.array(rows, np.int64)
        self.columns = np.array([_column_fields(own) for own in storages], np.int64)
        self.floats = sum(2 * own.keys.numel() for own in storages)
        # Of `layer_evictions`, with what they depend on.
        self.kept_rows: tuple[tuple[int, int, int], EvictionRows] | None = None

    @cached_property
    def journal_bytes(self) -> NDArray[np.int64]:
        """Bytes that each layer needs to have its eviction undone; zeros where it cannot be."""
        library = c_library()
        assert library is not None
        addresses = _row_addresses(self.rows).tolist() if self.rule.is_undoable else ()
        sizes = [library.larder_journal_bytes(address) for address in addresses]
        return np.array(sizes or [0] * len(self.layers), np.int64)

    def set_step(self, length: int, logits: NDArray[np.int64], journals: NDArray[np.int64]) -> None:
        """Set what changes with every token.

        Args:
            length: true tokens read.
            logits: address of the logits of each layer.
            journals: address of `journal_bytes` of each layer; 0 where it cannot be undone.
        """
        self.rows[:, STOP] = length - self._spared_last
        self.rows[:, LOGITS], self.rows[:, JOURNAL] = logits, journals
        self.rows[:, STATUS] = LEFT

    def rooms(self) -> list[int | None]:
        """Slack behind the fullest head of each layer; None for a layer that has not changed.

        Raises:
            MemoryError: merges could not allocate their buffers; a layer is half changed.
        """
        ends = self.rows[:, ROOM:]
        if (ends[:, 1] == FAILED).any():
            raise MemoryError("The merges of entries could not allocate their buffers.")
        return [room if status == DONE else None for room, status in ends.tolist()]

    def undo(self) -> None:
        """Give the layers that were evicted from in this step their former entries and numbers."""
        library = c_library()
        assert library is not None
        library.larder_undo_evictions(self.rows.ctypes.data, len(self.rows))


def _evict_alike(tables: Sequence[EvictionTable], roomy: int) -> list[list[int | None]]:
    """Evict from tables of one rule, in one call: a layer of all sequences, then the one before."""
    library, rule = c_library(), tables[0].rule
    assert library is not None
    order = np.argsort([layer for each in tables for layer in each.layers], kind="stable")
    rows = np.concatenate([each.rows for each in tables])[order]
    columns = np.concatenate([each.columns for each in tables])[order]
    floats = sum(each.floats for each in tables)
    threads = min(torch.get_num_threads(), len(rows), floats // LEAST_FLOATS + 1)
    call = _eviction_call(rule, roomy, threads)
    call.layers, call.count = rows.ctypes.data, len(rows)
    rows[:, STATUS] = LEFT
    if rule.is_accumulating:
        library.larder_evict_step(byref(call))
    else:
        call.columns = columns.ctypes.data
        library.larder_evict_by_rule(byref(call))
    ends = np.empty((len(rows), 2), np.int64)
    ends[order] = rows[:, ROOM:]
    for each, own in zip(tables, np.split(ends, _ends(tables)[:-1]), strict=True):
        each.rows[:, ROOM:] = own
    return [each.rooms() for each in tables]


def _ends(tables: Sequence[EvictionTable]) -> list[int]:
    """Number of layers up to each table, its own included."""
    return list(accumulate(len(each.layers) for each in tables))


def _eviction_call(rule: StepRule, roomy: int, threads: int) -> EvictionCall:
    """Call by a rule, of no layers yet."""
    call, merging, scoring = EvictionCall(roomy=roomy, threads=threads), rule.merging, rule.scoring
    if not rule.is_accumulating:
        call.scoring = STEP_SCORES.index(scoring.score)
        call.sinks, call.spared = scoring.sinks, scoring.spared
    if isinstance(merging, StepMerging):
        call.rate, call.rest, call.slack = merging.rate, 1 - merging.rate, merging.slack
    elif isinstance(merging, StepSpreading):
        call.window, call.sampled = merging.window, merging.seed is not None
        call.seed = (merging.seed or 0) & SEED_BITS
    return call


def _row_addresses(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Address of each row of fields."""
    return rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]


def _column_address(storage: EvictionStorage, index: int | None) -> int:
    """Address of a column; 0 for none."""
    if index is None:
        return 0
    return storage.columns.data_ptr() + index * len(storage.keys) * storage.columns.element_size()


def _column_fields(storage: EvictionStorage) -> tuple[int, ...]:
    """Fields of `struct step_columns` of c/decode_eviction.h."""
    updated = (
        storage.updated.get(column) for column in StepColumn if column is not StepColumn.MASS
    )
    return tuple(_column_address(storage, index) for index in (*updated, storage.joined))


def _fields(storage: EvictionStorage, edges: int) -> tuple[int, ...]:
    """Fields of `struct evicted` of c/decode_eviction.h."""
    stored, item = len(storage.keys), storage.keys.element_size()
    return (
        storage.keys.data_ptr(),
        storage.values.data_ptr(),
        storage.positions.data_ptr(),
        storage.columns.data_ptr(),
        0 if storage.logits is None else storage.logits.data_ptr(),
        storage.starts.data_ptr(),
        storage.lengths.data_ptr(),
        edges,
        _column_address(storage, storage.updated.get(StepColumn.MASS)),
        _column_address(storage, storage.log_counts),
        0 if storage.thresholds is None else storage.thresholds.data_ptr(),
        0,
        storage.keys.shape[1] * item,
        item,
        len(storage.columns),
        stored,
        0 if storage.logits is None else storage.logits.stride(0),
        len(storage.lengths),
        0 if storage.logits is None else len(storage.logits),
        -1 if storage.count is None else storage.count,
        storage.first,
        storage.stop,
        0,
        LEFT,
    )
