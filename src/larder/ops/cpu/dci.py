"""Dynamic continuous indexing on a CPU: search and insertion of all heads in one kernel call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, Structure, addressof, byref, c_float

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from larder.core.recall import TreeArrays
from larder.ops.cpu.c_library import INTEGER, POINTER, TreeSearchCall, c_library
from larder.ops.cpu.decode_attention import (
    MAX_HEAD_DIM,
    SUPPORTED_DTYPES,
    as_numpy,
    num_threads_for,
)

Array = Shaped[np.ndarray, "..."]

KEYS_PER_CELL = 16  # estimate for the work of a search
MAX_SERIAL_FLOATS = 1 << 22  # floats that one thread multiplies: about a millisecond


class TreeInsertion(Structure):
    """`struct tree_insertion` of c/tree_insertion.c."""

    _fields_ = [
        *((name, POINTER) for name in ("trees", "targets", "indexed", "squares", "direction")),
        *((name, POINTER) for name in ("members", "fills", "versions", "nexts", "lows", "tiers")),
        *((name, POINTER) for name in ("firsts", "centers", "scales", "means", "counts")),
        *((name, INTEGER) for name in ("width", "mean_dim")),
    ]


class ParentSearch(Structure):
    """`struct parent_search` of c/tree_insertion.c."""

    _fields_ = [
        *((name, POINTER) for name in ("tree", "entries", "found")),
        *((name, INTEGER) for name in ("count", "target", "next", "failed")),
        ("square", c_float),
    ]


def supports(keys: Tensor) -> bool:
    """True for contiguous CPU storage of a supported dtype."""
    return keys.device.type == "cpu" and keys.dtype in SUPPORTED_DTYPES and keys.is_contiguous()


def search(
    queries: Float[Tensor, "H D"],
    keys: Float[Tensor, "C D"],
    starts: Array,
    tree: TreeArrays,
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
    queries: Float[Tensor, "H D"] | None,
    keys: Float[Tensor, "C D"],
    layout: tuple[Array, ...],
    tree: TreeArrays,
    count: int,
) -> TreeSearchCall:
    """Call of the C kernel, without room for what it finds; it has addresses of what it is given,
    which the caller keeps.

    Args:
        queries: float32 and contiguous; None for a call that reads no queries.
        layout: starts, levels, beams, bases of pages and bases of cells, by `as_integers`.
    """
    heads = len(layout[0]) if queries is None else queries.shape[0]
    return TreeSearchCall(
        None if queries is None else queries.data_ptr(),
        keys.data_ptr(),
        *(each.ctypes.data for each in layout),
        *(each.ctypes.data for each in (tree.members, tree.fills, tree.nexts)),
        *(each.ctypes.data for each in (tree.firsts, tree.centers, tree.scales)),
        tree.means.ctypes.data if tree.means.shape[1] else None,
        heads=heads,
        trees=len(layout[0]),
        head_dim=keys.shape[1],
        item_bytes=keys.element_size(),
        page=tree.members.shape[1],
        count=count,
        threads=max(1, min(torch.get_num_threads(), heads)),
    )


def numba_search(
    queries: Float[Tensor, "H D"],
    keys: Float[Tensor, "C D"],
    starts: Array,
    tree: TreeArrays,
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
    kernel(rows, as_numpy(keys.detach()), starts, tuple(tree), bases, levels, beams, ranked, seen)
    return ranked, seen


def insert(
    targets: Array,
    indexed: Array,
    keys: Float[Tensor, "C D"],
    starts: Array,
    squares: Array,
    direction: Array,
    tree: TreeArrays,
    bases: Array,
    levels: Array,
    beams: Array,
    counts: Array,
) -> None:
    """Kernel of `insert`, in parallel over heads."""
    library = insertion_library(keys.shape[1])
    if library is None:
        layout = tree, bases, levels, beams, counts
        numba_insert(targets, indexed, keys, starts, squares, direction, *layout)
        return
    whole = tuple(as_integers(each) for each in (starts, levels, beams, *bases))
    searched = search_call(None, keys.detach(), whole, tree, 0)
    given = as_integers(targets), as_integers(indexed), np.ascontiguousarray(squares, np.float32)
    call = TreeInsertion(
        addressof(searched),
        *(each.ctypes.data for each in (*given, direction, *tree, counts)),
        width=targets.shape[1],
        mean_dim=tree.means.shape[1],
    )
    if library.larder_tree_insert(byref(call)):
        raise MemoryError("The insertion into a tree of keys could not allocate its buffers.")


def numba_insert(
    targets: Array,
    indexed: Array,
    keys: Float[Tensor, "C D"],
    starts: Array,
    squares: Array,
    direction: Array,
    tree: TreeArrays,
    bases: Array,
    levels: Array,
    beams: Array,
    counts: Array,
) -> None:
    """`insert` where no C kernel was compiled, and for heads that are too long for it."""
    from larder.ops.cpu import dci_insert_kernels as kernels  # compiles: not before it is needed

    stored = as_numpy(keys.detach())

    def insert_heads(first: int, stop: int) -> None:
        given = targets, indexed, stored, starts, squares, direction, tuple(tree), bases
        kernels.insert(first, stop, *given, levels, beams, counts)

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
    library = insertion_library(keys.shape[1])
    if library is None:
        return numba_parents(keys, entries, square, pages, cells, levels, target, beam)
    found = np.empty(len(entries), np.int64)
    members, fills, nexts = pages
    firsts, centers, scales, means = cells
    whole = tuple(
        np.array(each, np.int64)
        for each in ([0], [levels], [beam], [0, len(fills)], [0, len(firsts)])
    )
    unused = np.empty(len(fills))
    tree = TreeArrays(
        members=members,
        fills=fills,
        versions=unused,
        nexts=nexts,
        lows=unused,
        tiers=unused,
        firsts=firsts,
        centers=centers,
        scales=scales,
        means=means,
    )
    searched = search_call(None, keys.detach(), whole, tree, 0)
    searched.threads = torch.get_num_threads()
    given = as_integers(entries)
    call = ParentSearch(
        addressof(searched),
        given.ctypes.data,
        found.ctypes.data,
        count=len(entries),
        target=target,
        square=square,
    )
    if library.larder_tree_parents(byref(call)):
        raise MemoryError("The search for parents of entries could not allocate its buffers.")
    return found


def numba_parents(
    keys: Float[Tensor, "S D"],
    entries: Array,
    square: float,
    pages: tuple[Array, ...],
    cells: tuple[Array, ...],
    levels: int,
    target: int,
    beam: int,
) -> Array:
    """`parents` where no C kernel was compiled, and for heads that are too long for it."""
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
    coming: Array, ratios: Array, most: Array, sizes: Array, levels: Array, upcoming: Array
) -> Array:
    """Levels [K, N] of the next entries of each tree, -1 behind the last.

    Args:
        coming: number of these entries.
        ratios: size of level 1 over that of level 0, and of each level over that below.
        most: levels that each tree may have.
        sizes: entries of each level of each tree; updated in place.
        levels, upcoming: levels of each tree, and the level of its next entry; updated in place.
    """
    targets = np.full((len(coming), int(coming.max(initial=0))), -1, np.int64)
    library = insertion_library(0)
    if library is not None:
        own = as_integers(coming), ratios, as_integers(most), levels, sizes, upcoming, targets
        library.larder_tree_levels(*targets.shape, *(each.ctypes.data for each in own))
        return targets
    from larder.ops.cpu import dci_insert_kernels as kernels

    for tree, count in enumerate(coming.tolist()):
        at = sizes[tree], int(levels[tree]), int(upcoming[tree])
        after = kernels.count_levels(count, ratios, int(most[tree]), *at, targets[tree, :count])
        levels[tree], upcoming[tree] = after
    return targets


def insertion_library(head_dim: int) -> CDLL | None:
    """The library, if it has the kernels of insertion, as one of an older version does not."""
    library = c_library()
    has_kernels = library is not None and hasattr(library, "larder_tree_insert")
    return library if has_kernels and head_dim <= MAX_HEAD_DIM else None


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
