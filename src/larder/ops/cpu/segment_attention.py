"""Attention of the segments of a pass on a CPU: decode steps and blocks, in one call of a layer.

Decode steps append an entry to each of their storages; blocks append nothing. Every segment has the
bits that it has alone, on any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from larder.ops.cpu.block_attention import BlockWork
from larder.ops.cpu.c_library import INTEGER, POINTER, AttentionCall, c_library
from larder.ops.cpu.decode_attention import StepStorage, StepTable


class SegmentCall(ctypes.Structure):
    """`struct segment_call` of c/block_attention.c."""

    _fields_ = [
        *((name, POINTER) for name in ("blocks",)),
        ("count", INTEGER),
        *((name, POINTER) for name in ("step", "starts", "lengths")),
        ("threads", INTEGER),
    ]


class PassCall(ctypes.Structure):
    """`struct pass_call` of c/pass_attention.c."""

    _fields_ = [
        *((name, POINTER) for name in ("rows", "firsts", "queries", "keys", "values", "outs")),
        *((name, INTEGER) for name in ("count", "tokens", "heads", "kv_heads")),
        *((name, INTEGER) for name in ("head_dim", "item_bytes")),
        ("scaling", ctypes.c_float),
        ("threads", ctypes.c_int32),
    ]


class StepWork:
    """One token of each of N sequences, the storages that they are appended to, and outputs.

    A sequence's result is the same bits as `decode_attention` over its entries, whatever stands
    beside it. The rows behind the entries are written; lengths are the caller's to change.

    Args:
        positions: true positions of the tokens.
        storages: of one layer.
        scaling: of the logits.
    """

    def __init__(
        self,
        queries: Float[Tensor, "H N D"],
        keys: Float[Tensor, "K N D"],
        values: Float[Tensor, "K N D"],
        positions: Sequence[int],
        storages: Sequence[StepStorage],
        scaling: float,
    ) -> None:
        num_heads, self.batch_len, head_dim = queries.shape
        kv_heads = keys.shape[0]
        keys, values = (s if s.stride(-1) == 1 else s.contiguous() for s in (keys, values))
        given = queries.transpose(0, 1).float().contiguous()  # [N, H, D]
        self.table = StepTable.of([(keys, values, storages)], positions)
        layout = np.empty((2, self.batch_len * kv_heads), np.int64)
        self._out, self._lse = torch.empty_like(given), given.new_empty(self.batch_len, num_heads)
        self._held = keys, values, given, layout, storages  # the call has addresses of these
        group_len = num_heads // kv_heads
        self.call = AttentionCall(
            queries=given.data_ptr(),
            starts=layout[0].ctypes.data,
            lengths=layout[1].ctypes.data,
            outs=self._out.data_ptr(),
            lses=self._lse.data_ptr(),
            heads=self.batch_len * kv_heads,
            num_queries=group_len,
            head_dim=head_dim,
            item_bytes=keys.element_size(),
            scaling=scaling,
            threads=self.table.num_threads(group_len * head_dim),
            step=self.table.rows.ctypes.data,
            kv_heads=kv_heads,
        )

    @property
    def state(self) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "H N"]]:
        """Output and log-sum-exp, once a call has written them."""
        return self._out.transpose(0, 1), self._lse.T

    def run(self) -> None:
        """Append and attend.

        Raises:
            MemoryError: buffers could not be allocated.
        """
        library = c_library()
        assert library is not None
        call = self.call
        if library.larder_decode_step(byref(call), call.starts, call.lengths):
            raise MemoryError("Attention over the caches could not allocate its buffers.")
        self.attend_coded()

    def attend_coded(self) -> None:
        """Merge the attention to coded entries into that to the others.

        Raises:
            MemoryError: buffers could not be allocated.
        """
        library, coded = c_library(), self.table.coded
        if not coded.size:
            return
        assert library is not None
        sizes = INTEGER(self.batch_len), byref(self.call), INTEGER(torch.get_num_threads())
        if library.larder_attend_coded(POINTER(coded.ctypes.data), *sizes):
            raise MemoryError("Attention to coded entries could not allocate its buffers.")


@cache
def can_join() -> bool:
    """True if one call takes several blocks and decode steps; a library of an older version does
    not."""
    return hasattr(c_library(), "larder_attend_segments")


def attend_segments(blocks: Sequence[BlockWork], step: StepWork | None) -> None:
    """Attend to blocks and decode steps of different sequences in one call.

    Equal to `run` of each of them, bit by bit.

    Args:
        blocks: at least one.
        step: None for none.

    Raises:
        MemoryError: buffers could not be allocated; only rows behind the entries of the decode
            steps are changed.
    """
    library = c_library()
    assert library is not None, "callers ask can_join() first"
    addresses = (POINTER * len(blocks))(*(ctypes.addressof(block.call) for block in blocks))
    threads = max(block.call.threads for block in blocks)
    call = SegmentCall(blocks=ctypes.addressof(addresses), count=len(blocks), threads=threads)
    if step is not None:
        call.step, call.threads = ctypes.addressof(step.call), max(threads, step.call.threads)
        call.starts, call.lengths = step.call.starts, step.call.lengths
    if library.larder_attend_segments(byref(call)):
        raise MemoryError("Attention of a pass could not allocate its buffers.")
    if step is not None:
        step.attend_coded()


@cache
def can_attend_pass() -> bool:
    """True if one call takes a layer of a pass; a library of an older version does not."""
    return hasattr(c_library(), "larder_attend_pass")


class PassAttention:
    """Attention of a pass over storages whose addresses are known: one call for each layer.

    A sequence with one token is a decode step, others read a block. Each has the bits that it has
    in `attend_segments`. Tokens are written behind the entries; lengths are the caller's to change.

    Args:
        rows: fields of `struct step_row` of c/decode_attention.h, by layer and sequence.
        widths: tokens of each sequence.
    """

    def __init__(self, rows: NDArray[np.int64], widths: Sequence[int]) -> None:
        self._rows = rows
        self._firsts = np.cumsum([0, *widths], dtype=np.int64)
        self._call = PassCall(
            firsts=self._firsts.ctypes.data,
            count=len(widths),
            tokens=int(self._firsts[-1]),
            threads=torch.get_num_threads(),
        )

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "H Q D"],
        keys: Float[Tensor, "K Q D"],
        values: Float[Tensor, "K Q D"],
        scaling: float,
    ) -> Float[Tensor, "H Q D"]:
        """Append the tokens to the storages of a layer, and attend.

        Args:
            scaling: of the logits.

        Raises:
            MemoryError: buffers could not be allocated; only rows behind the entries are changed.
        """
        library, call = c_library(), self._call
        assert library is not None, "callers ask can_attend_pass() first"
        queries, keys, values = (side.contiguous() for side in (queries, keys, values))
        out = torch.empty_like(queries)
        call.rows, call.scaling = self._rows[layer].ctypes.data, scaling
        call.queries, call.outs = queries.data_ptr(), out.data_ptr()
        call.keys, call.values = keys.data_ptr(), values.data_ptr()
        call.heads, call.kv_heads = queries.shape[0], keys.shape[0]
        call.head_dim, call.item_bytes = queries.shape[2], queries.element_size()
        if library.larder_attend_pass(byref(call)):
            raise MemoryError("Attention of a pass could not allocate its buffers.")
        return out
