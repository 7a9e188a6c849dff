"""Trees of keys on a CPU: searched and added to without the interpreter, all heads in one call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from larder.ops.cpu.decode_attention import SUPPORTED_DTYPES, as_numpy, num_threads_for

Array = Shaped[np.ndarray, "..."]

KEYS_PER_CELL = 16  # a guess, for how much work a search is
MAX_SERIAL_FLOATS = 1 << 22  # floats that one thread multiplies by itself: about a millisecond


def supports(keys: Tensor) -> bool:
    """Whether the kernels take this storage."""
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
    """Safe from several threads at once."""
    from larder.ops.cpu import dci_kernels as kernels  # compiles: not before it is needed

    asked = queries.float().contiguous().numpy()
    ranked = np.full((len(asked), count), -1, np.int64)
    seen = np.zeros(len(asked), np.int64)
    layout = starts, tree, bases, levels, beams
    threads = num_threads_for(int(beams.sum()) * KEYS_PER_CELL * asked.shape[1])
    go = kernels.search_in_parallel if threads > 1 else kernels.search
    go(asked, as_numpy(keys.detach()), *layout, ranked, seen)
    return ranked, seen


def insert(
    targets: Array,
    known: Array,
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
    """Heads are shared by threads."""
    from larder.ops.cpu import dci_insert_kernels as kernels

    stored = as_numpy(keys.detach())
    case = targets, known, stored, starts, squares, direction, tree, bases, levels, beams, counts
    work = int((targets >= 0).sum()) * int(beams.max()) * KEYS_PER_CELL * keys.shape[1]
    _run_in_threads(len(starts), work, lambda first, stop: kernels.insert(first, stop, *case))


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
    """Entries are shared by threads."""
    from larder.ops.cpu import dci_insert_kernels as kernels

    found = np.empty(len(entries), np.int64)
    stored = as_numpy(keys.detach())
    case = entries, stored, np.float32(square), pages, cells, levels, target, beam, found
    work = len(entries) * beam * KEYS_PER_CELL * keys.shape[1]
    _run_in_threads(len(entries), work, lambda first, stop: kernels.parents(first, stop, *case))
    return found


def count_levels(
    count: int, ratios: Array, most: int, sizes: Array, levels: int, upcoming: int
) -> tuple[Array, int, int]:
    """Levels of the next entries, how many levels there are then, and the level behind."""
    from larder.ops.cpu import dci_insert_kernels as kernels

    targets = np.empty(count, np.int64)
    return targets, *kernels.count_levels(count, ratios, most, sizes, levels, upcoming, targets)


def _run_in_threads(count: int, floats: int, go: Callable[[int, int], None]) -> None:
    """Work on [0, count), in as many threads as its floats are worth.

    Plain threads: starting them costs little beside such work, and kernels that run on numba's
    would have to be compiled once more.
    """
    threads = min(torch.get_num_threads(), floats // MAX_SERIAL_FLOATS + 1, count)
    if threads < 2:
        go(0, count)
        return
    edges = [count * t // threads for t in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(go, edges, edges[1:]))
