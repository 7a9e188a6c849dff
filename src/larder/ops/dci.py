"""Dynamic continuous indexing: search in trees of keys, and insertion into them.

`larder.ops.cpu.dci_kernels` documents the arrays of a tree; the CPU kernels, for float32 and
bfloat16, are in `larder.ops.cpu.dci`. Both they and the loops here visit the same pages; they may
differ where two products are equal but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from larder.core.recall import TreeArrays
from larder.ops.cpu import dci as fast

Array = Shaped[np.ndarray, "..."]


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
    """Best pages [H, count] of each query, padded with -1, and the count of keys compared."""
    if fast.supports(keys):
        return fast.search(queries, keys, starts, tree, bases, levels, beams, count)
    ranked = np.full((len(queries), count), -1, np.int64)
    seen = np.zeros(len(queries), np.int64)
    for index, query in enumerate(queries.float()):
        head = index * len(starts) // len(queries)
        one = _Head.of(tree, bases, head, keys[int(starts[head]) :])
        met = [
            page
            for level in one.descend(query, int(levels[head]), int(beams[head]))
            for page in level
        ]
        best = sorted(met, key=lambda page: (-max(page[1]), page[0]))[:count]
        ranked[index, : len(best)] = [page for page, _ in best]
        seen[index] = sum(len(products) for _, products in met)
    return ranked, seen


def visited_pages(
    queries: Float[Tensor, "H D"],
    tree: TreeArrays,
    bases: Array,
    levels: Array,
    beams: Array,
    most: int,
) -> tuple[Array, Array]:
    """Pages [H, most] that a search visits in trees whose cells have means, padded with -1, and
    the count of their entries: no key is read.

    Args:
        most: pages of the largest tree.
    """
    rows = np.zeros(
        (int((bases[0, 1:] - bases[0, :-1]).max()) * tree.members.shape[1], queries.shape[1]),
        np.float32,
    )
    starts = np.zeros(len(levels), np.int64)
    keys = torch.from_numpy(rows)
    return search(queries, keys, starts, tree, bases, levels, beams, most)


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
    """Insert new entries into existing trees with free space.

    Args:
        targets: level of each new entry [K, N], -1 behind the last of a head.
        indexed: number of entries that each head had.
        counts: live pages and cells of each head [K, 2]; updated in place.
    """
    if fast.supports(keys):
        fast.insert(
            targets, indexed, keys, starts, squares, direction, tree, bases, levels, beams, counts
        )
        return
    for head, first in enumerate(indexed.tolist()):
        one = _Head.of(tree, bases, head, keys[int(starts[head]) :])
        for at, target in enumerate(targets[head].tolist()):
            if target >= 0:
                one.insert(
                    entry=first + at,
                    levels=int(levels[head]),
                    target=target,
                    beam=int(beams[head]),
                    square=float(squares[head]),
                    direction=direction,
                    counts=counts[head],
                )


def parents(
    keys: Float[Tensor, "S D"],
    entries: Array,
    square: float,
    pages: dict[str, Array],
    cells: dict[str, Array],
    levels: int,
    target: int,
    beam: int,
) -> Array:
    """Cell of the nearest lifted entry one level above `target`, for each of some entries."""
    if fast.supports(keys):
        page_arrays = pages["members"], pages["fills"], pages["nexts"]
        cell_arrays = tuple(cells.values())
        return fast.parents(keys, entries, square, page_arrays, cell_arrays, levels, target, beam)
    own = pages | {"versions": np.zeros(0)} | cells
    one = _Head(**own, keys=keys)
    found = [
        one.nearest_cell(keys[entry].float(), square, levels, target, beam) for entry in entries
    ]
    return np.array(found, np.int64)


def projections(keys: Float[Tensor, "S D"], square: float, direction: Array) -> Array:
    """Projections of lifted keys on a direction [D + 1]."""
    along = np.empty(len(keys), np.float32)
    for first in range(0, len(keys), 1 << 14):
        some = keys[first : first + (1 << 14)].float()
        tails = (square - some.square().sum(-1)).clamp(min=0).sqrt()
        lifted = some @ torch.from_numpy(direction[:-1]) + tails * float(direction[-1])
        along[first : first + (1 << 14)] = lifted.numpy()
    return along


def quantize_means(means: Float[Tensor, "U D"]) -> tuple[Array, Array]:
    """Int8 codes of rows, and the scale of each row."""
    scales = means.abs().amax(1) / 127
    divisors = scales.masked_fill(scales == 0, 1.0)
    return (means / divisors[:, None]).round().to(torch.int8).numpy(), scales.numpy()


@dataclass
class _Head:
    """Tree of one head: views of its arrays, and its keys by entry number."""

    members: Array
    fills: Array
    versions: Array
    nexts: Array
    lows: Array
    tiers: Array
    firsts: Array
    centers: Array
    scales: Array
    means: Array
    _: KW_ONLY
    keys: Tensor

    @classmethod
    def of(cls, tree: TreeArrays, bases: Array, head: int, keys: Tensor) -> _Head:
        (low, end), (first, stop) = bases[:, head : head + 2]
        views = [array[low:end] for array in tree[:6]] + [array[first:stop] for array in tree[6:]]
        return cls(*views, keys=keys)

    def descend(
        self, query: Tensor, levels: int, beam: int, square: float = -1.0, above: int = -1
    ) -> Iterator[list[tuple[int, list[float]]]]:
        """Pages of the best cells, level by level, with the products of their members.

        Args:
            square: squared radius of the sphere of lifted keys; negative for plain products.
            above: the level to stop before.
        """
        cells = [0]
        for level in range(levels - 1, above, -1):
            met = [
                (page, self._products(query, page, level, square)) for page in self._pages(cells)
            ]
            yield met
            cells = self._best(query, met, beam, square) if level else []

    def nearest_cell(self, key: Tensor, square: float, levels: int, target: int, beam: int) -> int:
        """Cell of the nearest lifted entry on the level above `target`.

        Where the best cells of a level have no entries below, as those opened since, all are
        compared.
        """
        found = [(0.0, 0)]
        for met in self.descend(key, levels, beam, square, target):
            found = [
                (-product, int(cell))
                for page, products in met
                for product, cell in zip(products, self.members[page], strict=False)
            ]
        if not found:
            return self.nearest_cell(key, square, levels, target, len(self.firsts))
        return min(found)[1]

    def insert(
        self,
        entry: int,
        levels: int,
        target: int,
        beam: int,
        square: float,
        direction: Array,
        counts: Array,
    ) -> None:
        """Insert one entry."""
        cell = self.nearest_cell(self.keys[entry].float(), square, levels, target, beam)
        number = entry
        if target > 0:
            number, counts[1] = int(counts[1]), counts[1] + 1
            self.firsts[number], self.centers[number] = -1, entry
            mean, scale = quantize_means(self.keys[entry : entry + 1].float())
            self.means[number], self.scales[number] = mean[0, : self.means.shape[1]], scale[0]
        page = int(self.firsts[cell])
        if page < 0:
            page, counts[0] = int(counts[0]), counts[0] + 1
            self._open(page, cell, target)
        along = float(self._projected([entry], square, direction)[0])
        while self.nexts[page] >= 0 and self.lows[self.nexts[page]] <= along:
            page = int(self.nexts[page])
        members = self.members[page, : self.fills[page]].tolist()
        numbers = [*members, number]
        if len(members) < self.members.shape[1]:
            self.lows[page] = min(self.lows[page], along) if members else along
            self._write_page(page, numbers)
            return
        entries = [int(self.centers[n]) if target else n for n in numbers]
        alongs = self._projected(entries, square, direction).tolist()
        order = sorted(zip(alongs, numbers, strict=True))
        fresh, counts[0] = int(counts[0]), counts[0] + 1
        self.nexts[fresh], self.nexts[page] = self.nexts[page], fresh
        self.tiers[fresh] = target
        half = (len(order) + 1) // 2
        for side, part in ((page, order[:half]), (fresh, order[half:])):
            self.lows[side] = part[0][0]
            self._write_page(side, [n for _, n in part])

    def _best(
        self, query: Tensor, met: list[tuple[int, list[float]]], beam: int, square: float
    ) -> list[int]:
        """Cells with the highest scores: by their means for a query, else by their entries."""
        found = [
            (product, int(cell))
            for page, products in met
            for product, cell in zip(products, self.members[page], strict=False)
        ]
        if square < 0 and self.means.shape[1]:
            mean = {cell: torch.from_numpy(self.means[cell]).float() for _, cell in found}
            found = [(float(mean[c] @ query) * float(self.scales[c]), c) for _, c in found]
        return [cell for _, cell in sorted(found, key=lambda each: (-each[0], each[1]))[:beam]]

    def _pages(self, cells: Iterable[int]) -> Iterator[int]:
        for cell in cells:
            page = int(self.firsts[cell])
            while page >= 0:
                yield page
                page = int(self.nexts[page])

    def _products(self, query: Tensor, page: int, level: int, square: float) -> list[float]:
        members = self.members[page, : self.fills[page]]
        rows = self.keys[torch.from_numpy(self.centers[members] if level else members).long()]
        products = rows.float() @ query
        if square >= 0:
            rest = square - rows.float().square().sum(-1)
            own = max(square - float(query.square().sum()), 0.0)
            # A key outside of the sphere is lifted by 0, and is farther away by what it is longer.
            products = products + rest.clamp(min=0).sqrt() * math.sqrt(own) + rest.clamp(max=0) / 2
        return products.tolist()

    def _projected(self, entries: list[int], square: float, direction: Array) -> Array:
        return projections(self.keys[torch.tensor(entries)], square, direction)

    def _open(self, page: int, cell: int, level: int) -> None:
        self.firsts[cell] = page
        self.fills[page], self.nexts[page], self.tiers[page] = 0, -1, level

    def _write_page(self, page: int, members: list[int]) -> None:
        """Replace the members of a page; a change of content increments its version."""
        before = self.members[page].tolist()
        self.members[page] = -1
        self.members[page, : len(members)] = members
        self.fills[page] = len(members)
        self.versions[page] += int(self.members[page].tolist() != before)
