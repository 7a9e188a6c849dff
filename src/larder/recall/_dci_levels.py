"""On which level of a tree each entry lives.

Counted: in the order of entries, every level gets its share of the one below, and a new one is
opened when the one below it is full for the first time. This is the rule of the code released with
IceCache, whose level sizes it gives exactly. At random: each entry is promoted again and again with
the ratio as the chance, drawn from its own number, so that an entry's level depends on nothing
else; levels that stay empty are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from larder.ops.cpu.dci import count_levels
from larder.recall._dci_forest import MAX_LEVELS, Array, DciForest


@dataclass(frozen=True)
class LevelAssigner:
    """
    Args:
        first, further: the ratio of level 1 to level 0, and of each to the next above.
        drawn: whether levels are random.
        stream: what random levels depend on besides head and entry.
    """

    first: float
    further: float
    drawn: bool
    stream: tuple[int, ...]

    def of_all(self, count: int, head: int) -> tuple[Array, int]:
        """Levels of the first entries of a head, and that of the next."""
        if not self.drawn:
            sizes = np.zeros(MAX_LEVELS, np.int64)
            targets, _, upcoming = count_levels(count, self._ratios, MAX_LEVELS, sizes, 0, 0)
            return targets, upcoming
        _, targets = np.unique(self._draws(0, count, head), return_inverse=True)
        return targets, 0

    def of_more(self, forest: DciForest, head: int, count: int) -> Array:
        """Levels of entries that come to a tree, which gets no higher by them."""
        levels = int(forest.levels[head])
        if self.drawn:
            known = int(forest.known[head])
            targets = np.minimum(self._draws(known, count, head), levels - 1)
            forest.sizes[head] += np.bincount(targets, minlength=MAX_LEVELS)
            return targets
        at = forest.sizes[head], levels, int(forest.upcoming[head])
        targets, _, forest.upcoming[head] = count_levels(count, self._ratios, levels, *at)
        return targets

    @property
    def _ratios(self) -> Array:
        return np.array([self.first, self.further], np.float64)

    def _draws(self, known: int, count: int, head: int) -> Array:
        """How often each of the entries behind the known ones is promoted."""
        source = np.random.default_rng((*self.stream, head))
        luck = source.random(known + count)[known:]
        highest = 1 + np.floor(np.log(luck / self.first) / np.log(self.further))
        return np.where(luck < self.first, highest, 0).clip(max=MAX_LEVELS - 1).astype(np.int64)
