"""Layers that take over what an earlier layer was scored, so that they keep the same entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from larder.core.observation import Observation
from larder.core.types import Packed


@dataclass(frozen=True)
class LeaderScores:
    """The scores of a layer, and where the entries stood that they are of."""

    scores: Packed
    positions: Int[Tensor, " T"]
    lengths: tuple[int, ...]

    def fits(self, seen: Observation) -> bool:
        """Whether another layer's heads hold the same positions."""
        entries = seen.entries
        if entries.lengths != self.lengths:
            return False
        return torch.equal(entries.packed_positions(), self.positions)


class SharedLayerScores:
    """Scores layers in groups: the first of each group leads, once per pass.

    A layer whose heads do not hold what the leader's held is scored by itself.

    Args:
        together: managed layers in a group; 1 leaves every layer to itself.
    """

    def __init__(self, together: int) -> None:
        self._together = together
        self._leads: dict[int, LeaderScores] = {}

    def scores(
        self, row: int, place: int, seen: Observation, score: Callable[[Observation], Packed]
    ) -> Packed:
        """The scores of a layer.

        Args:
            row: which of the caches of a pass.
            place: which of the managed layers, from 0.
            score: scores a layer by itself.
        """
        if self._together == 1:
            return score(seen)
        if place % self._together and self._leads[row].fits(seen):
            return self._leads[row].scores
        scores = score(seen)
        if place % self._together == 0:
            positions = seen.entries.packed_positions()
            self._leads[row] = LeaderScores(scores, positions, seen.entries.lengths)
        return scores
