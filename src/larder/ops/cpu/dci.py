"""Dynamic continuous indexing on a CPU: search and insertion of all heads in one kernel call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from larder.ops.cpu.c_library import TreeSearchCall, c_library
from larder.ops.cpu.decode_attention import (
    MAX_HEAD_DIM,
    SUPPORTED_DTYPES,
    as_numpy,
    num_threads_for,
)

Array = Shaped[np.ndarray, "..."]

KEYS_PER_CELL = 16  # estimate for the work of a search
MAX_SERIAL_FLOATS = 1 << 22  # floats that one thread multiplies: about a millisecond


def supports(keys: Tensor) -> bool:
    """True for contiguous CPU storage of a supported dtype."""
    return keys.device.type == "cpu" and keys.dtype in SUPPORTED_DTYPES and keys.is_contiguous()


def search(
    queries: Float[Tensor, "H D"],
    keys: Float[Tensor, "C D"],
    starts: Array,
    tree: tuple[Array, ...],
    bases: Array,
    levels: Array,
    beams: Array,
    count: int,
) -> tuple[Array, Array]:
    """Kernel of `search`; thread-safe."""
    library = c_library()
    if library is None or queries.shape[1] > MAX_HEAD_DIM:
        return numba_search(queries, keys, starts, tree, bases, levels, beams, count)
    rows = queries.detach().float().contiguous()
    ranked = np.full((len(rows), count), -1, np.int64)
    seen = np.zeros(len(rows), np.int64)
    layout = tuple(as_integers(each) for each in (starts, levels, beams, *bases))
    call = search_call(rows, keys.detach(), layout, tree, count)
    call.ranked, call.seen = ranked.ctypes.data, seen.ctypes.data
    if library.larder_tree_search(byref(call)):
        raise MemoryError("The search in a tree of keys could not allocate its buffers.")
    return ranked, seen


def as_integers(numbers: Array) -> Array:
    """Contiguous int64."""
    return np.ascontiguousarray(numbers, np.int64)


def search_call(
    queries: Float[Tensor, "H D"],
    keys: Float[Tensor, "C D"],
    layout: tuple[Array, ...],
    tree: tuple[Array, ...],
    count: int,
) -> TreeSearchCall:
    """Call of the C kernel, without room for what it finds; it has addresses of what it is given,
    which the caller keeps.

    Args:
        queries: float32 and contiguous.
        layout: starts, levels, beams, bases of pages and bases of cells, by `as_integers`.
    """
    members, fills, _, nexts, _, _, firsts, centers, scales, means = tree
    return TreeSearchCall(
        queries.data_ptr(),
        keys.data_ptr(),
        *(each.ctypes.data for each in (*layout, members, fills, nexts, firsts, centers, scales)),
        means.ctypes.data if means.shape[1] else None,
        heads=queries.shape[0],
        trees=len(layout[0]),
        head_dim=queries.shape[1],
        item_bytes=keys.element_size(),
        page=members.shape[1],
        count=count,
        threads=max(1, min(torch.get_num_threads(), queries.shape[0])),
    )


def numba_search(
    queries: Float[Tensor, "H D"],
    keys: Float[Tensor, "C D"],
    starts: Array,
    tree: tuple[Array, ...],
    bases: Array,
    levels: Array,
    beams: Array,
    count: int,
) -> tuple[Array, Array]:
    """`search` where no C kernel was compiled, and for heads that are too long for it."""
    from larder.ops.cpu import dci_kernels as kernels  # compiles: not before it is needed

    rows = queries.float().contiguous().numpy()
    ranked = np.full((len(rows), count), -1, np.int64)
    seen = np.zeros(len(rows), np.int64)
    threads = num_threads_for(int(beams.sum()) * KEYS_PER_CELL * rows.shape[1])
    kernel = kernels.search_in_parallel if threads > 1 else kernels.search
    kernel(rows, as_numpy(keys.detach()), starts, tree, bases, levels, beams, ranked, seen)
    return ranked, seen


def insert(
    targets: Array,
    indexed: Array,
    keys: Float[Tensor, "C D"],
    starts: Array,
    squares: Array,
    direction: Array,
    tree: tuple[Array, ...],
    bases: Array,
    levels: Array,
    beams: Array,
    counts: Array,
) -> None:
    """Kernel of `insert`, in parallel over heads."""
    from larder.ops.cpu import dci_insert_kernels as kernels

    stored = as_numpy(keys.detach())

    def insert_heads(first: int, stop: int) -> None:
        kernels.insert(
            first,
            stop,
            targets,
            indexed,
            stored,
            starts,
            squares,
            direction,
            tree,
            bases,
            levels,
            beams,
            counts,
        )

    work = int((targets >= 0).sum()) * int(beams.max()) * KEYS_PER_CELL * keys.shape[1]
    _run_in_threads(len(starts), work, insert_heads)


def parents(
    keys: Float[Tensor, "S D"],
    entries: Array,
    square: float,
    pages: tuple[Array, ...],
    cells: tuple[Array, ...],
    levels: int,
    target: int,
    beam: int,
) -> Array:
    """Kernel of `parents`, in parallel over entries."""
    from larder.ops.cpu import dci_insert_kernels as kernels

    found = np.empty(len(entries), np.int64)
    stored, radius = as_numpy(keys.detach()), np.float32(square)

    def find(first: int, stop: int) -> None:
        kernels.parents(
            first, stop, entries, stored, radius, pages, cells, levels, target, beam, found
        )

    work = len(entries) * beam * KEYS_PER_CELL * keys.shape[1]
    _run_in_threads(len(entries), work, find)
    return found


def count_levels(
    count: int, ratios: Array, most: int, sizes: Array, levels: int, upcoming: int
) -> tuple[Array, int, int]:
    """Levels of the next entries, number of levels afterwards, and level of the entry behind."""
    from larder.ops.cpu import dci_insert_kernels as kernels

    targets = np.empty(count, np.int64)
    return targets, *kernels.count_levels(count, ratios, most, sizes, levels, upcoming, targets)


def _run_in_threads(count: int, floats: int, go: Callable[[int, int], None]) -> None:
    """Run `go` over [0, count), in a number of threads that suits the number of floats.

    Python threads, because kernels on numba's threads would have to be compiled a second time.
    """
    threads = min(torch.get_num_threads(), floats // MAX_SERIAL_FLOATS + 1, count)
    if threads < 2:
        go(0, count)
        return
    edges = [count * t // threads for t in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(go, edges, edges[1:]))
