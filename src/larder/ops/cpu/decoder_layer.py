"""Decoder layer of the Llama family around its attention, for a few rows on a CPU.

A decode step reads every weight once, so its limit is the memory's bandwidth. The C kernel reads
the weights where the model stores them, with the query, key and value projections in one call, and
norms, rotation, activation and residuals between them. Rows and weights are bfloat16, rounded to
where transformers' layers do, or float32; sums are taken in another order. With matrix units (AMX)
a tile of bfloat16 weights is multiplied with 16 rows at a time. Within the kernel a row's result is
the same bits alone and beside others; batches of more than `max_rows` rows take torch's products,
which differ.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import fields
from functools import cache, partial
from threading import Lock
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from larder.ops.cpu.c_library import INTEGER, POINTER, c_library
from larder.ops.cpu.decode_attention import MAX_HEAD_DIM, MAX_QUERY_ROWS, StepTable
from larder.ops.cpu.kernel_choice import saved_choice, slowdown, thread_seconds
from larder.ops.decoder_layer import LayerSizes, LayerTensors

SUFFIXES = {torch.bfloat16: "", torch.float32: "_float32"}  # of the C functions
MAX_ROWS = 512  # of which the kernel is measured: a block of a prompt
ROW_COUNTS = (MAX_ROWS, 256, 128, 64, 32, 16, 8, 1)
OUTPUT_MULTIPLE, INPUT_MULTIPLE = 16, 32  # of the sizes that the kernel multiplies
TIMED_WEIGHTS = (24, 576, 1536)  # 42 MB: a step finds its weights in memory, not in a cache
TIMED_ROWS = 128  # products of more rows take longer than reading weights: fewer weights are timed
# Slowdown of the products alone that what the layer saves around them makes up for: about as much
# as products of 4 rows take, and at least what norms, rotation and activation do of many rows.
MOST_SLOWDOWN, SAVED_ROWS, LEAST_SLOWDOWN = 1.25, 4, 1.05

_measuring = Lock()

Product = Callable[[Tensor, Tensor], Tensor]
# Table of the storages of all layers, given their new keys and values [L, K, N, D].
StepTableMaker = Callable[[Tensor, Tensor], StepTable]


class LayerPointers(ctypes.Structure):
    """`struct decoder_layer` of c/decoder_layer.c."""

    _fields_ = [(field.name, POINTER) for field in fields(LayerTensors)]

    @staticmethod
    def of(tensors: LayerTensors) -> LayerPointers:
        given = (vars(tensors)[field.name] for field in fields(tensors))
        return LayerPointers(*(None if each is None else each.data_ptr() for each in given))


class RowPointers(ctypes.Structure):
    """`struct decoder_rows` of c/decoder_layer.c."""

    _fields_ = [
        *((name, INTEGER) for name in ("rows", "hidden", "inner", "heads", "kv_heads", "head_dim")),
        *((name, POINTER) for name in ("states", "cosines", "sines")),
        *((name, POINTER) for name in ("queries", "keys", "values", "attended")),
        ("epsilon", ctypes.c_float),
        ("threads", ctypes.c_int32),
    ]


class DecoderStep(ctypes.Structure):
    """`struct decoder_step` of c/decoder_layer.h."""

    _fields_ = [
        *((name, POINTER) for name in ("layers", "rows", "storages", "scalings")),
        *((name, INTEGER) for name in ("count", "attention_threads")),
        *((name, POINTER) for name in ("coded", "eviction", "evicted", "columns")),
    ]


class LayerSides(NamedTuple):
    """Rotated queries and keys, and values of one layer."""

    queries: Float[Tensor, "H N D"]
    keys: Float[Tensor, "K N D"]
    values: Float[Tensor, "K N D"]


class LayerRows:
    """States of a few rows on their way through the layers. Not thread-safe.

    Args:
        states: input of the first layer; copied.
        cosines, sines: of the rotation of each row.
    """

    def __init__(
        self,
        sizes: LayerSizes,
        states: Float[Tensor, "N hidden"],
        cosines: Float[Tensor, "N D"],
        sines: Float[Tensor, "N D"],
    ) -> None:
        rows, dim = states.shape[0], sizes.head_dim
        self.states = states.clone(memory_format=torch.contiguous_format)
        self._angles = cosines.contiguous(), sines.contiguous()
        self._kernels = _kernels(states.dtype)
        self._shapes = (sizes.heads, rows, dim), (sizes.kv_heads, rows, dim)
        self._call = RowPointers(
            rows=rows,
            hidden=sizes.hidden,
            inner=sizes.inner,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=dim,
            states=self.states.data_ptr(),
            cosines=self._angles[0].data_ptr(),
            sines=self._angles[1].data_ptr(),
            epsilon=sizes.epsilon,
            threads=torch.get_num_threads(),
        )

    def attention_inputs(
        self, layer: LayerPointers
    ) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "K N D"], Float[Tensor, "K N D"]]:
        """Rotated queries and keys, and values of a layer."""
        queries, keys = (self.states.new_empty(shape) for shape in self._shapes)
        values, call = torch.empty_like(keys), self._call
        call.queries, call.keys, call.values = (x.data_ptr() for x in (queries, keys, values))
        _check(self._kernels.attention_inputs(byref(layer), byref(call)))
        return queries, keys, values

    def take_step(
        self, layers: Sequence[LayerPointers], tabulate: StepTableMaker, scalings: Sequence[float]
    ) -> list[LayerSides]:
        """Append each row to the storages of every layer, and pass the states through all of them.

        One call, with the bits of one layer after the other. Lengths are the caller's to change,
        unless the table has evictions.

        Args:
            tabulate: makes the table of the storages.
            scalings: of the logits of each layer.
        """
        count, call = len(layers), self._call
        queries, keys = (self.states.new_empty(count, *shape) for shape in self._shapes)
        values = torch.empty_like(keys)
        call.queries, call.keys, call.values = (x.data_ptr() for x in (queries, keys, values))
        sides = list(map(LayerSides, queries.unbind(), keys.unbind(), values.unbind()))
        table = tabulate(keys, values)
        pointers, factors = (LayerPointers * count)(*layers), (ctypes.c_float * count)(*scalings)
        step = DecoderStep(
            layers=ctypes.addressof(pointers),
            rows=ctypes.addressof(call),
            storages=table.rows.ctypes.data,
            scalings=ctypes.addressof(factors),
            count=count,
            attention_threads=table.num_threads(queries[0, :, 0].numel() // keys.shape[1]),
            coded=table.coded.ctypes.data if table.coded.size else None,
        )
        if table.evictions is not None:
            shared, evicted, columns = table.evictions
            step.eviction, step.evicted = ctypes.addressof(shared), evicted.ctypes.data
            step.columns = columns.ctypes.data if columns.size else None
        kernel = _step_kernel(self.states.dtype)
        assert kernel is not None, "callers ask can_step() first"
        _check(kernel(byref(step)))
        return sides

    def finish_layer(self, layer: LayerPointers, attended: Float[Tensor, "H N D"]) -> None:
        """Pass the states through what stands behind the attention of a layer."""
        attended = attended.contiguous()
        self._call.attended = attended.data_ptr()
        _check(self._kernels.layer_output(byref(layer), byref(self._call)))


def are_supported(sizes: LayerSizes) -> bool:
    """True if the kernel multiplies the matrices of layers of such sizes."""
    wide = sizes.heads * sizes.head_dim
    products = (
        (sizes.head_dim, sizes.hidden),
        (sizes.hidden, wide),
        (sizes.inner, sizes.hidden),
        (sizes.hidden, sizes.inner),
    )
    return all(is_supported(outputs, inputs) for outputs, inputs in products)


def can_step(sizes: LayerSizes, dtype: torch.dtype) -> bool:
    """True if one call can take decode steps through all layers, attention to such heads included.

    A library of an older version cannot.
    """
    is_attended = sizes.heads // sizes.kv_heads <= MAX_QUERY_ROWS
    return is_attended and sizes.head_dim <= MAX_HEAD_DIM and _step_kernel(dtype) is not None


def is_supported(outputs: int, inputs: int) -> bool:
    """True if the kernel multiplies matrices of such sizes."""
    return outputs % OUTPUT_MULTIPLE == 0 and inputs % INPUT_MULTIPLE == 0


def few_rows_linear(
    rows: Float[Tensor, "N D"], weight: Float[Tensor, "M D"]
) -> Float[Tensor, "N M"]:
    """Product of a few rows with the outputs of a linear layer."""
    rows, out = rows.contiguous(), rows.new_empty(rows.shape[0], weight.shape[0])
    sizes = *rows.shape, weight.shape[0]
    pointers = rows.data_ptr(), weight.data_ptr(), None
    product = _kernels(rows.dtype).linear
    _check(product(*pointers, *sizes, out.data_ptr(), torch.get_num_threads()))
    return out


def max_rows(dtype: torch.dtype) -> int:
    """Largest number of rows for which the kernel is taken, 0 for none; measured once per machine.

    Thread-safe: all threads get one number.
    """
    with _measuring:
        return _saved_rows(dtype)


@cache
def _saved_rows(dtype: torch.dtype) -> int:
    if c_library() is None or dtype not in SUFFIXES:
        return 0
    name = f"rows of {str(dtype).removeprefix('torch.')}"
    return saved_choice(name, partial(_measured_rows, dtype), _most_rows(dtype))


def _measured_rows(dtype: torch.dtype) -> int:
    most = _most_rows(dtype)
    weights = torch.ones(TIMED_WEIGHTS, dtype=dtype)
    for count in ROW_COUNTS:
        if count > most:
            continue
        rows = torch.ones(count, TIMED_WEIGHTS[2], dtype=dtype)
        timed = weights[: TIMED_WEIGHTS[0] * TIMED_ROWS // max(count, TIMED_ROWS)]
        ours, others = (
            partial(_seconds_of_pass, product, rows, timed) for product in (few_rows_linear, linear)
        )
        if slowdown(ours, others) < max(LEAST_SLOWDOWN, min(MOST_SLOWDOWN, 1 + SAVED_ROWS / count)):
            return count
    return 0


def _most_rows(dtype: torch.dtype) -> int:
    """Number of rows beyond which this processor does not run the kernel fast."""
    return _kernels(dtype).most_rows()


def _seconds_of_pass(product: Product, rows: Tensor, weights: Tensor) -> float:
    """CPU seconds in which rows are multiplied by every weight once."""
    return thread_seconds(lambda: [product(rows, weight) for weight in weights])


class _Kernels(NamedTuple):
    """C functions for one type of numbers."""

    attention_inputs: Callable[..., int]
    layer_output: Callable[..., int]
    linear: Callable[..., int]
    most_rows: Callable[[], int]


@cache
def _kernels(dtype: torch.dtype) -> _Kernels:
    library = c_library()
    assert library is not None, "callers ask max_rows() first"
    names = (f"larder_{name}{SUFFIXES[dtype]}" for name in _Kernels._fields)
    return _Kernels(*(getattr(library, name) for name in names))


@cache
def _step_kernel(dtype: torch.dtype) -> Callable[..., int] | None:
    """C function of a decode step; None in a library of an older version."""
    kernel = getattr(c_library(), f"larder_decoder_step{SUFFIXES[dtype]}", None)
    if kernel is not None:
        kernel.argtypes = [POINTER]
    return kernel


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("A decoder layer could not allocate its buffers.")
