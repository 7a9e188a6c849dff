"""DCI trees of a layer, one per kv head, in arrays that all heads share.

`larder.ops.cpu.dci_kernels` describes the arrays. A head owns rows
[bases[0, h], bases[0, h + 1]) of the pages and [bases[1, h], bases[1, h + 1]) of the cells, the
last of them slack. Numbers of pages and cells are per head and start at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from larder.core.recall import TreeArrays

Array = Shaped[np.ndarray, "..."]

MAX_LEVELS = 16
SPARE_SHARE = 8  # a head that grows gets room for an eighth more
PAGES = {
    "members": np.int32,
    "fills": np.int16,
    "versions": np.int32,
    "nexts": np.int32,
    "lows": np.float32,
    "tiers": np.int8,
}
CELLS = {"firsts": np.int32, "centers": np.int32, "scales": np.float32, "means": np.int8}
_HEAD_FIELDS = ("peaks", "levels", "sizes", "upcoming", "squares", "built", "known")


@dataclass(frozen=True)
class DciTree:
    """Newly built tree of one head: its arrays without slack, and the state for later insertion.

    Args:
        sizes: entries of each level.
        upcoming: the level of the next entry, where levels are filled by counting.
        square: squared radius of the sphere that keys are lifted to.
    """

    pages: dict[str, Array]
    cells: dict[str, Array]
    levels: int
    sizes: Array
    upcoming: int
    square: float
    entries: int


class DciForest:
    """Tree arrays of all heads, and per head their live lengths and the state for insertion.

    `counts` has live pages and cells, `peaks` the most pages there ever were: versions of pages
    that a later tree did not need are kept, so that a reused number never has an old version.

    Args:
        mean_dim: numbers of each cell's mean; 0 for none.
    """

    def __init__(self, heads: int, page: int, mean_dim: int) -> None:
        self._widths = {"members": page, "means": mean_dim}
        self.arrays = {name: self._empty(name, heads) for name in (*PAGES, *CELLS)}
        self.arrays["firsts"][:] = -1
        self.bases = np.tile(np.arange(heads + 1), (2, 1))
        self.counts = np.tile(np.array([0, 1]), (heads, 1))
        self.peaks = np.zeros(heads, np.int64)
        self.levels = np.zeros(heads, np.int64)
        self.sizes = np.zeros((heads, MAX_LEVELS), np.int64)
        self.upcoming = np.zeros(heads, np.int64)
        self.squares = np.zeros(heads, np.float32)
        self.built = np.zeros(heads, np.int64)
        self.known = np.zeros(heads, np.int64)

    @property
    def tree(self) -> TreeArrays:
        """Arrays as kernels take them."""
        return TreeArrays(**self.arrays)

    def head(self, number: int) -> dict[str, Array]:
        """Arrays of one head, as views, its slack included."""
        low, high = self.bases[0, number], self.bases[0, number + 1]
        pages = {name: self.arrays[name][low:high] for name in PAGES}
        low, high = self.bases[1, number], self.bases[1, number + 1]
        return pages | {name: self.arrays[name][low:high] for name in CELLS}

    def reserve(self, pages: Array, cells: Array) -> None:
        """Ensure capacity for at least so many pages and cells of each head."""
        rooms = np.diff(self.bases, axis=1)
        wanted = np.stack([pages, cells])
        if bool((wanted <= rooms).all()):
            return
        grown = np.where(wanted > rooms, wanted + wanted // SPARE_SHARE + 1, rooms)
        old = [self.head(number) for number in range(len(self.levels))]
        ends = np.cumsum(grown, axis=1)
        self.bases = np.concatenate([np.zeros((2, 1), np.int64), ends], axis=1)
        totals = dict.fromkeys(PAGES, ends[0, -1]) | dict.fromkeys(CELLS, ends[1, -1])
        self.arrays = {name: self._empty(name, int(total)) for name, total in totals.items()}
        for number, arrays in enumerate(old):
            for name, array in self.head(number).items():
                array[: len(arrays[name])] = arrays[name]

    def replace(self, number: int, built: DciTree) -> None:
        """Replace the tree of a head; versions change for pages whose contents change."""
        count, cells = len(built.pages["fills"]), len(built.cells["firsts"])
        pages, own_cells = np.diff(self.bases, axis=1)
        pages[number], own_cells[number] = max(pages[number], count), max(own_cells[number], cells)
        self.reserve(pages, own_cells)
        before = self.entries_of(number, int(self.peaks[number]))
        arrays = self.head(number)
        for name, array in (built.pages | built.cells).items():
            arrays[name][: len(array)] = array
        arrays["members"][count:], arrays["fills"][count:] = -1, 0
        self.counts[number] = count, cells
        self.peaks[number] = max(self.peaks[number], count)
        after = self.entries_of(number, int(self.peaks[number]))
        same = (after[: len(before)] == before).all(1)
        arrays["versions"][: len(before)] += ~same
        self.levels[number], self.upcoming[number] = built.levels, built.upcoming
        self.sizes[number] = built.sizes
        self.squares[number], self.built[number] = built.square, built.entries

    def entries_of(self, number: int, count: int) -> Array:
        """Entry numbers of the first pages of a head [count, S], -1 after the last of each."""
        arrays = self.head(number)
        members = arrays["members"][:count]
        upper = (arrays["tiers"][:count, None] > 0) & (members >= 0)
        return np.where(upper, arrays["centers"][np.where(upper, members, 0)], members)

    def versions(self, pages: Int64[Tensor, "N P"]) -> Array:
        """Versions of pages of any set; that of page 0 in place of -1."""
        return self.arrays["versions"][self._rows(pages)]

    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        rows = self._rows(pages)
        members = self.arrays["members"][rows]  # [N, P, S]
        upper = (self.arrays["tiers"][rows][..., None] > 0) & (members >= 0)
        cells = self._bases(1, len(pages))[..., None] + np.where(upper, members, 0)
        entries = np.where(upper, self.arrays["centers"][cells], members)
        entries[pages.numpy() < 0] = -1
        return torch.from_numpy(entries.astype(np.int64))

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(array) for array in self._all_arrays())

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, slack included."""
        return sum(array.nbytes for array in self._all_arrays())

    def state(self) -> dict[str, Tensor]:
        """All arrays, without slack."""
        ends = {**dict.fromkeys(PAGES, self.peaks), **dict.fromkeys(CELLS, self.counts[:, 1])}
        state = {name: torch.from_numpy(getattr(self, name).copy()) for name in _HEAD_FIELDS}
        state["counts"] = torch.from_numpy(self.counts.copy())
        for name, stops in ends.items():
            parts = [self.head(h)[name][:stop] for h, stop in enumerate(stops.tolist())]
            state[name] = torch.from_numpy(np.concatenate(parts))
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from the tensors of `state`."""
        for name in (*_HEAD_FIELDS, "counts"):
            setattr(self, name, state[name].clone().numpy())
        self.arrays = {name: state[name].clone().numpy() for name in (*PAGES, *CELLS)}
        ends = np.stack([np.cumsum(self.peaks), np.cumsum(self.counts[:, 1])])
        self.bases = np.concatenate([np.zeros((2, 1), np.int64), ends], axis=1)

    def _all_arrays(self) -> list[Array]:
        fields = [getattr(self, name) for name in _HEAD_FIELDS]
        return [*self.arrays.values(), self.bases, self.counts, *fields]

    def _bases(self, kind: int, sets: int) -> Array:
        """First row of the head of each set."""
        heads = np.arange(sets) // (sets // len(self.levels))
        return self.bases[kind, heads][:, None]

    def _rows(self, pages: Int64[Tensor, "N P"]) -> Array:
        most = max(len(self.arrays["fills"]) - 1, 0)
        return np.minimum(self._bases(0, len(pages)) + pages.clamp(min=0).numpy(), most)

    def _empty(self, name: str, rows: int) -> Array:
        kind = (PAGES | CELLS)[name]
        if name in self._widths:
            return np.full((rows, self._widths[name]), -1 if name == "members" else 0, kind)
        return np.zeros(rows, kind)
