"""Decode step over recalled entries on a CPU: search in trees of keys, loading of pages into slots,
and attention to them and to other entries, in one kernel call.

The bits are those of the three kernels one after the other: `larder.ops.cpu.dci.search`,
`larder.ops.cpu.page_slots.load_pages` and `larder.ops.cpu.decode_attention.decode_attention`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.recall import KeyTrees
from larder.ops.cpu.c_library import INTEGER, POINTER, AttentionCall, c_library
from larder.ops.cpu.dci import as_integers, search_call
from larder.ops.cpu.decode_attention import MAX_HEAD_DIM, AttendedRows, attention_call, supports
from larder.ops.cpu.page_slots import page_load

State = tuple[Float[Tensor, "H 1 D"], Float[Tensor, "H 1"]]

NO_MEMORY, NO_ROOM = 1, 2  # `enum outcome` of c/recall_step.c


class RecallCall(ctypes.Structure):
    """`struct recall_step` of c/recall_step.c."""

    _fields_ = [
        *((name, POINTER) for name in ("search", "slots", "versions", "tiers", "pages")),
        ("attention", POINTER),
        *((name, INTEGER) for name in ("count", "requested", "width", "most")),
    ]


class RecalledStep(NamedTuple):
    """Result of a call.

    Args:
        outcome: 0 if all was done. NO_ROOM: nothing was changed. NO_MEMORY: pages that were
            requested are loaded, but not attended to.
        states: attention to the slots, and to each of the others.
        pages: found for each kv head, -1 behind the last.
        requested, moved: pages of all sets that were found, and that were copied into slots.
        width: most pages of a set.
        num_pages: entries that the table of a set needs.
    """

    outcome: int
    states: list[State]
    pages: Int64[Tensor, "K P"]
    requested: int
    moved: int
    width: int
    num_pages: int


@cache
def _has_kernel() -> bool:
    """True if the library has the kernel; one of an older version does not."""
    return hasattr(c_library(), "larder_recall_step")


def can_recall(queries: Float[Tensor, "H 1 D"], keys: Tensor, values: Tensor, heads: int) -> bool:
    """True if one call takes a step over entries in such storage.

    Args:
        heads: kv heads.
    """
    is_known = supports(queries, keys, values, heads) and queries.shape[-1] <= MAX_HEAD_DIM
    is_alone = not (torch.is_grad_enabled() and queries.requires_grad)
    return is_known and is_alone and _has_kernel()


def recall_step(
    queries: Float[Tensor, "H 1 D"],
    trees: KeyTrees,
    count: int,
    page: int,
    tensors: dict[str, Tensor],
    rows: Sequence[AttendedRows],
    scaling: float,
    masked: float,
) -> RecalledStep:
    """Find pages, load them into slots, in place, and attend to them and to other entries.

    Args:
        count: pages that are found for each kv head at most.
        page: entries of a page.
        tensors: slots and slow tier as in `page_slots.load_pages`, but for what to load.
        rows: slots, and the other entries.
        masked: see there.
    """
    library = c_library()
    assert library is not None, "callers ask can_recall() first"
    given = queries.detach().float().contiguous()
    layout = tensors["starts"].numpy(), trees.levels, trees.beams, *trees.bases
    whole = tuple(as_integers(part) for part in layout)
    search = search_call(given[:, 0], tensors["keys"], whole, trees.tree, count)
    slots = page_load(tensors, page, masked)
    pages = torch.empty(len(trees.levels), count, dtype=torch.int64)
    outs = given.new_empty(len(rows), *given.shape)
    lses = given.new_empty(len(rows), *given.shape[:2])
    states = list(zip(outs.unbind(), lses.unbind(), strict=True))
    sizes = [len(rows[0].keys), *(int(own.lengths.sum()) for own in rows[1:])]
    calls = [
        attention_call(given, own, size, scaling, state)
        for own, size, state in zip(rows, sizes, states, strict=True)
    ]
    attention = (AttentionCall * len(calls))(*calls)
    call = RecallCall(
        search=addressof(search),
        slots=addressof(slots),
        versions=trees.tree.versions.ctypes.data,
        tiers=trees.tree.tiers.ctypes.data,
        pages=pages.data_ptr(),
        attention=addressof(attention),
        count=len(calls),
    )
    outcome = library.larder_recall_step(byref(call))
    counts = call.requested, slots.moved, call.width, call.most
    return RecalledStep(outcome, states, pages, *counts)
