"""Loading of pages into slots on a CPU: choice of slots, copies and masks in one kernel call."""

from __future__ import annotations

import ctypes
from ctypes import byref

from torch import Tensor

from larder.ops.cpu.c_library import INTEGER, POINTER, c_library

_POINTERS = (
    ("pages", "versions", "numbers", "starts", "keys", "values", "slot_keys", "slot_values")
    + ("biases", "counts", "slot_pages", "slot_versions", "table")
)  # fmt: skip
_SIZES = ("sets", "width", "slots", "page", "kv_heads", "table_width", "row_bytes")


class PageLoad(ctypes.Structure):
    """`struct page_load` of c/page_slots.c."""

    _fields_ = [
        *((name, POINTER) for name in _POINTERS),
        *((name, INTEGER) for name in _SIZES),
        ("masked", ctypes.c_float),
        ("moved", ctypes.c_int32),
    ]


def supports(*stored: Tensor) -> bool:
    """True for contiguous CPU storage of one dtype, where the kernel was compiled."""
    kinds = {(each.device.type, each.dtype) for each in stored}
    is_alike = len(kinds) == 1 and kinds.pop()[0] == "cpu"
    return is_alike and all(each.is_contiguous() for each in stored) and c_library() is not None


def load_pages(tensors: dict[str, Tensor], masked: float) -> int:
    """Load pages into slots, in place; returns the number of pages that were copied.

    Args:
        tensors: by the names of the C structure, all contiguous; see `PagePool.load`.
        masked: bias of slots without a requested entry.
    """
    library = c_library()
    assert library is not None, "callers ask supports() first"
    call = page_load(tensors, tensors["numbers"].shape[2], masked)
    call.width = tensors["numbers"].shape[1]
    if library.larder_load_pages(byref(call)):
        raise MemoryError("Loading pages into slots could not allocate its buffers.")
    return call.moved


def page_load(tensors: dict[str, Tensor], page: int, masked: float) -> PageLoad:
    """Call of the C kernel, without the number of pages to load; what to load may be missing. It
    has addresses of the tensors, which the caller keeps.

    Args:
        tensors, masked: see `load_pages`.
        page: entries of a page.
    """
    sets, slots = tensors["slot_pages"].shape
    return PageLoad(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        sets=sets,
        slots=slots,
        page=page,
        kv_heads=tensors["starts"].shape[0],
        table_width=tensors["table"].shape[1],
        row_bytes=tensors["keys"].shape[1] * tensors["keys"].element_size(),
        masked=masked,
    )
