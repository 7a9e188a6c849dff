"""Fake device: the calls of an accelerator on a CPU, counted, with host reads refused.

Inside the context every operator call counts as a launch, but those that only make views or
allocate. Reading a tensor on the host, or an operator whose output has a size that only the device
knows, raises. The kernels that a CPU lacks are checked against their contract and answered by a
readable twin, so that the code of an accelerator runs where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from larder.core import LarderError
from larder.ops import (
    AttentionBackend,
    SegmentTables,
    gathered_attention,
    page_eviction,
    paged_attention,
    pages,
    reference_paged_attention,
)
from larder.ops.gpu import varlen

VARLEN = "torch_attn::_varlen_attn"
# Launches of operators that stand for several: the kernel, and its state of random numbers.
LAUNCHES = {VARLEN: 2}
# Operators that wait for the device: numbers, and outputs whose size depends on numbers.
SYNCHRONIZING = frozenset(
    {
        *("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"),
        *("aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::masked_select"),
        *("aten::unique_dim", "aten::_unique2", "aten::unique_consecutive", "aten::bincount"),
        *("aten::allclose", "aten::repeat_interleave.Tensor"),
    }
)
MASKED = frozenset({"aten::index.Tensor", "aten::index_put_", "aten::index_put"})
# Reads on the host that reach no operator where the tensor is on a CPU.
HOST_READS = frozenset({"tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__"})
# Neither a view of another tensor nor a kernel.
ALLOCATING = (
    *("aten::empty", "aten::new_empty", "aten::detach", "aten::lift_fresh", "aten::alias"),
    "aten::_unsafe_view",
)


class HostSynchronization(LarderError):
    """The host waited for the device in a step that must not."""


class FakeDevice:
    """Context in which torch on the CPU stands for an accelerator. Not reentrant.

    Attributes:
        launches: names of the operators that an accelerator would launch, in order.
    """

    def __init__(self) -> None:
        self.launches: list[str] = []
        self._stack = ExitStack()

    @property
    def launch_count(self) -> int:
        """Kernels that an accelerator would launch."""
        return sum(LAUNCHES.get(name, 1) for name in self.launches)

    def __enter__(self) -> FakeDevice:
        self._stack.enter_context(_ReadRefusal())
        self._stack.enter_context(_LaunchCounter(self.launches))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


class _ReadRefusal(TorchFunctionMode):
    """Refusal of methods that read a tensor on the host."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_READS:
            raise _synchronization(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


class _LaunchCounter(TorchDispatchMode):
    """Count of operator calls, and refusal of those that synchronize."""

    def __init__(self, launches: list[str]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, named = func.name(), dict(kwargs or {})
        if name in SYNCHRONIZING or (name in MASKED and _has_mask(args[1])):
            raise _synchronization(name)
        if name == VARLEN:
            self._launches.append(name)
            return _answer_varlen(*args, **named)
        if not func.is_view and not name.startswith(ALLOCATING):
            self._launches.append(name)
        return func(*args, **named)


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(own is not None and own.dtype in (torch.bool, torch.uint8) for own in indices)


def _synchronization(name: str) -> HostSynchronization:
    return HostSynchronization(
        f"{name} makes the host wait for the device: keep lengths and tables on the device, and "
        "what the host must know on the host."
    )


def _answer_varlen(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    query_len: int,
    key_len: int,
    is_causal: bool,
    scaling: float,
    window: Sequence[int],
    enable_gqa: bool,
    lengths: Tensor,
    table: Tensor,
    num_splits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Answer of the readable twin to a call of `varlen_attn` that keeps its contract."""
    segments, pages = len(lengths), keys.shape[1]
    _require(all(own.dtype in varlen.DTYPES for own in (queries, keys, values)), "half precision")
    _require(keys.shape == values.shape and keys.shape[2] == 1, "pools [N, P, 1, D]")
    _require(pages % varlen.PAGE_MULTIPLE == 0, "pages of a multiple of 256 tokens")
    integers = (query_offsets, key_offsets, lengths, table)
    _require(all(own.dtype is torch.int32 for own in integers), "int32 tables and lengths")
    _require(all(own.is_contiguous() for own in integers), "contiguous tables and lengths")
    _require(all(own.stride(-1) == 1 for own in (queries, keys, values)), "contiguous rows")
    _require(num_splits == 1 and enable_gqa and not is_causal, "num_splits=1, no mask")
    _require(list(window) == [-1, -1], "no window")
    _require(len(query_offsets) == segments + 1 == len(key_offsets), "offsets of each segment")
    _require(len(queries) == segments * query_len, "as many queries as the offsets say")
    _require(table.shape[1] * pages == key_len, "room of the table as max_k")
    own = queries.unflatten(0, (segments, query_len)).transpose(1, 2)
    tables = SegmentTables(table, lengths, query_offsets, key_offsets)
    out, lse = reference_paged_attention(own, keys[:, :, 0], values[:, :, 0], tables, scaling)
    rows = out.transpose(1, 2).flatten(0, 1).to(queries.dtype)
    state = torch.zeros(2, dtype=torch.uint64)
    return rows, lse.transpose(0, 1).flatten(1), state


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"varlen_attn over pages requires {rule}.")


def _attention_by_triton(queries: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Readable twin of attention by Triton, whose output has the dtype of the queries."""
    _require(queries.is_contiguous(), "contiguous queries, or another launch copies them")
    out, lse = gathered_attention(queries, *rest)
    return out.to(queries.dtype), lse


# Launches of the functions of Triton's kernels over pages, checked under its interpreter.
KERNEL_LAUNCHES = {
    "append_step": 1,
    "gather_pages": 1,
    "compact_pages": 1,
    "add_column_mass": 1,
    "evict_lowest": 2,
    "paged_attention": 2,
}


class FakeKernels:
    """Triton's kernels on a fake device: launches are counted, and readable twins answer."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self._is_answering = device, False

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        """Have functions over pages call the kernels, and attention by Triton."""
        forms = {
            module: {name: vars(module)[name] for name in KERNEL_LAUNCHES if name in vars(module)}
            for module in (pages, page_eviction)
        }
        for module, twins in forms.items():
            counted = {name: self._counted(name, form) for name, form in twins.items()}
            patch.setattr(module, "_kernels", partial(self._kernels, SimpleNamespace(**counted)))
        patch.setattr(page_eviction, "_check", lambda scores, is_ranked: None)  # reads: CPU alone
        attend = self._counted("paged_attention", _attention_by_triton)
        patch.setitem(paged_attention._FORMS, AttentionBackend.TRITON, lambda: attend)

    def _kernels(self, kernels: SimpleNamespace, pool: Tensor) -> SimpleNamespace | None:
        return None if self._is_answering else kernels

    def _counted(self, name: str, twin: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            launches, former = self._device.launches, self._is_answering
            before, self._is_answering = len(launches), True
            try:
                out = twin(*args, **named)
            finally:
                self._is_answering = former
            launches[before:] = [f"triton::{name}"] * KERNEL_LAUNCHES[name]
            return out

        return call

    def count_calls(
        self, patch: pytest.MonkeyPatch, *methods: tuple[type, str]
    ) -> dict[str, list[int]]:
        """Launches of each call of some methods from now on, by their names."""
        counts: dict[str, list[int]] = {name: [] for _, name in methods}

        def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                before = self._device.launch_count
                out = method(*args, **named)
                counts[name].append(self._device.launch_count - before)
                return out

            return call

        for owner, name in methods:
            patch.setattr(owner, name, counted(name, vars(owner)[name]))
        return counts
