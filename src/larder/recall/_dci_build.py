"""Construction of a head's DCI tree from all of its keys, level by level from the top."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from larder.ops import dci
from larder.ops.cpu.dci import count_levels
from larder.recall._dci_forest import CELLS, MAX_LEVELS, Array, DciForest, DciTree

MAX_PAIRS = 1 << 22  # products held at once: 16 MiB
CHUNK = 1 << 14  # keys widened at once
EXACT_LEVEL_ENTRIES = 4096  # entries of a level up to which every pair is compared for the nearest


def build_tree(
    keys: Float[Tensor, "S D"],
    targets: Array,
    upcoming: int,
    square: float,
    direction: Array,
    page: int,
    beam: int,
    mean_dim: int,
) -> DciTree:
    """DCI tree of one head.

    Args:
        targets: the level of each entry, 0 the finest; no level is empty.
        upcoming: level of the next entry.
        square: squared radius of the sphere that keys are lifted to.
        direction: sort direction of the entries of a cell, in lifted space.
        beam: search width for the nearest entry of a level larger than `EXACT_LEVEL_ENTRIES`.
        mean_dim: numbers kept of the mean of each cell: all or none.
    """
    count = len(targets)
    sizes = np.bincount(targets, minlength=MAX_LEVELS)
    levels = int(np.count_nonzero(sizes))
    upper = np.nonzero(targets > 0)[0]
    upper = upper[np.argsort(-targets[upper], kind="stable")]
    cell_of = np.full(count, -1, np.int64)
    cell_of[upper] = 1 + np.arange(len(upper))
    centers = np.concatenate([[0], upper]).astype(np.int32)
    builder = _PageBuilder(page, len(centers))
    alongs = dci.projections(keys, square, direction)
    parent_of = np.zeros(count, np.int64)
    blank = np.zeros(len(centers), np.float32), np.zeros((len(centers), 0), np.int8)
    for level in range(levels - 1, -1, -1):
        nodes = np.nonzero(targets == level)[0]
        above = np.nonzero(targets == level + 1)[0]
        parents = np.zeros(len(nodes), np.int64)
        if EXACT_LEVEL_ENTRIES < len(above):
            cells = dict(zip(CELLS, (builder.firsts, centers, *blank), strict=True))
            tree = builder.pages(), cells
            parents = dci.parents(keys, nodes, square, *tree, levels, level, beam)
        elif len(above):
            parents = cell_of[above[nearest_parents(keys, nodes, above, square)]]
        parent_of[nodes] = parents
        members = cell_of[nodes] if level else nodes
        builder.add(level, parents, members, alongs[nodes])
    means, scales = dci.quantize_means(_cell_means(keys, targets, parent_of, cell_of, len(centers)))
    cells = dict(zip(CELLS, (builder.firsts, centers, scales, means[:, :mean_dim]), strict=True))
    return DciTree(builder.pages(), cells, levels, sizes, upcoming, square, count)


def nearest_parents(keys: Float[Tensor, "S D"], nodes: Array, above: Array, square: float) -> Array:
    """Index in `above` of the entry nearest to each of `nodes`, in lifted space, by all pairs."""
    candidates, tails = _lift_keys(keys, above, square)
    found = np.empty(len(nodes), np.int64)
    step = max(MAX_PAIRS // len(above), 1)
    for first in range(0, len(nodes), step):
        some, heights = _lift_keys(keys, nodes[first : first + step], square)
        products = torch.addmm(torch.outer(heights, tails), some, candidates.T)
        found[first : first + step] = products.argmax(1).numpy()
    return found


def _lift_keys(keys: Float[Tensor, "S D"], rows: Array, square: float) -> tuple[Tensor, Tensor]:
    """Keys, and the lifted coordinate: c times the numbers of the paper."""
    some = keys[torch.from_numpy(rows)].float()
    return some, (square - some.square().sum(-1)).clamp(min=0).sqrt()


def _cell_means(
    keys: Float[Tensor, "S D"], targets: Array, parent_of: Array, cell_of: Array, cells: int
) -> Float[Tensor, "U D"]:
    """Mean of each cell over all entries under its center, the center included."""
    sums = torch.zeros(cells, keys.shape[1])
    counts = torch.zeros(cells)
    for level in range(int(targets.max(initial=0)) + 1):
        for nodes in np.array_split(np.nonzero(targets == level)[0], 1 + len(keys) // CHUNK):
            rows, below = keys[torch.from_numpy(nodes)].float(), torch.from_numpy(cell_of[nodes])
            number = torch.ones(len(nodes))
            if level:
                sums[below] += rows
                counts[below] += 1
                rows, number = sums[below], counts[below]
            above = torch.from_numpy(parent_of[nodes])
            sums.index_add_(0, above, rows)
            counts.index_add_(0, above, number)
    return sums / counts.clamp(min=1)[:, None]


class _PageBuilder:
    """Pages of a tree under construction."""

    def __init__(self, page: int, cells: int) -> None:
        self._page = page
        self.firsts = np.full(cells, -1, np.int32)
        self._levels: list[dict[str, Array]] = []
        self._count = 0

    def add(self, level: int, parents: Array, members: Array, alongs: Array) -> None:
        """Divide the members of each cell into pages of even size, in the order of `alongs`."""
        order = np.lexsort((members, alongs, parents))
        cells, starts, sizes = np.unique(parents[order], return_index=True, return_counts=True)
        pages = -(-sizes // self._page)
        even, longer = sizes // pages, sizes % pages
        ranks = np.arange(len(order)) - np.repeat(starts, sizes)
        wide, edge = np.repeat(even + 1, sizes), np.repeat(longer * (even + 1), sizes)
        late = ranks - edge
        narrow = np.repeat(even, sizes)
        within = np.where(late < 0, ranks // wide, np.repeat(longer, sizes) + late // narrow)
        slots = np.where(late < 0, ranks % wide, late % narrow)
        firsts = self._count + np.cumsum(pages) - pages
        total = int(pages.sum())
        rows = np.repeat(firsts, sizes) + within - self._count
        table = {
            "members": np.full((total, self._page), -1, np.int32),
            "fills": np.bincount(rows, minlength=total).astype(np.int16),
            "nexts": np.arange(self._count + 1, self._count + total + 1, dtype=np.int32),
            "lows": np.zeros(total, np.float32),
            "tiers": np.full(total, level, np.int8),
        }
        table["members"][rows, slots] = members[order]
        table["nexts"][firsts + pages - 1 - self._count] = -1
        table["lows"][rows[slots == 0]] = alongs[order][slots == 0]
        self.firsts[cells] = firsts
        self._levels.append(table)
        self._count += total

    def pages(self) -> dict[str, Array]:
        """All pages so far."""
        names = self._levels[0]
        return {name: np.concatenate([table[name] for table in self._levels]) for name in names}


@dataclass(frozen=True)
class LevelAssigner:
    """Levels of tree entries, by counting or at random.

    Args:
        first, further: size ratio of level 1 to level 0, and of each level to the next above.
        drawn: random levels.
        stream: seed of random levels, besides head and entry.
    """

    first: float
    further: float
    drawn: bool
    stream: tuple[int, ...]

    def initial_levels(self, count: int, head: int) -> tuple[Array, int]:
        """Levels of the first `count` entries of a head, and that of the next."""
        if self.drawn:
            _, targets = np.unique(self._draws(0, count, head), return_inverse=True)
            return targets, 0
        sizes, (levels, upcoming) = np.zeros((1, MAX_LEVELS), np.int64), np.zeros((2, 1), np.int64)
        coming, most = np.array([[count], [MAX_LEVELS]], np.int64)
        targets = count_levels(coming, self._ratios, most, sizes, levels, upcoming)
        return targets[0], int(upcoming[0])

    def next_levels(self, forest: DciForest, coming: Array) -> Array:
        """Levels [K, N] of new entries of existing trees, whose height stays the same; -1 behind
        the last of a tree.
        """
        if not self.drawn:
            own = forest.levels.copy()
            return count_levels(
                coming, self._ratios, own, forest.sizes, forest.levels, forest.upcoming
            )
        targets = np.full((len(coming), int(coming.max())), -1, np.int64)
        for head in np.nonzero(coming)[0].tolist():
            count, highest = int(coming[head]), int(forest.levels[head]) - 1
            drawn = np.minimum(self._draws(int(forest.known[head]), count, head), highest)
            forest.sizes[head] += np.bincount(drawn, minlength=MAX_LEVELS)
            targets[head, :count] = drawn
        return targets

    @property
    def _ratios(self) -> Array:
        return np.array([self.first, self.further], np.float64)

    def _draws(self, indexed: int, count: int, head: int) -> Array:
        """Number of promotions of each new entry."""
        source = np.random.default_rng((*self.stream, head))
        samples = source.random(indexed + count)[indexed:]
        highest = 1 + np.floor(np.log(samples / self.first) / np.log(self.further))
        return np.where(samples < self.first, highest, 0).clip(max=MAX_LEVELS - 1).astype(np.int64)
