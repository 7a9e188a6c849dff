"""Base classes of head rules: reduction of query heads to one score per entry and kv head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.observation import Entries, Observation
from larder.core.part import PolicyPart


class HeadRule(PolicyPart, ABC):
    """Reduction over query heads. A frozen dataclass.

    Query head h belongs to kv head h // R.
    """

    def join_stored(
        self, statistics: Float[Tensor, "R C"], entries: Entries, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        """Reduction of statistics in storage layout, one number per storage row; see `join`."""
        by_head = [statistics[:, entries.rows(head)] for head in range(len(entries.lengths))]
        return self.join(by_head, entries, observation)

    @abstractmethod
    def join(
        self, statistics: Sequence[Float[Tensor, "R _"]], entries: Entries, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        """One number per entry and kv head.

        Args:
            statistics: for each kv head, numbers of its R query heads for its S entries.
            entries: those entries.
            observation: observation of the layer, for its spec and calibration.
        """


class GroupRule(HeadRule):
    """Base of rules that reduce the R query heads of each kv head separately."""

    @abstractmethod
    def group(self, statistics: Float[Tensor, "R S"]) -> Float[Tensor, " S"]:
        """One number per entry of a kv head."""

    def join(
        self, statistics: Sequence[Float[Tensor, "R _"]], entries: Entries, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        return [self.group(head) for head in statistics]

    def join_stored(
        self, statistics: Float[Tensor, "R C"], entries: Entries, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        joined = self.group(statistics)
        return [joined[entries.rows(head)] for head in range(len(entries.lengths))]


def positions_of(entries: Entries) -> list[Int[Tensor, " _"]]:
    """True positions of each head's entries."""
    return list(torch.split(entries.packed_positions().long(), list(entries.lengths)))


def mean_by_position(
    heads: Sequence[tuple[Float[Tensor, " _"], Int[Tensor, " _"]]],
    positions: Sequence[Int[Tensor, " _"]],
) -> Float[Tensor, " P"]:
    """Mean at each position over the heads that hold it; NaN where none does.

    Args:
        heads: statistics and positions of the entries of each head; at least one head.
        positions: positions of the entries of all kv heads.
    """
    length = max((int(own.max()) + 1 for own in positions if len(own)), default=0)
    sums = heads[0][0].new_zeros(length)
    counts = torch.zeros_like(sums)
    # Head by head: a single call would add in undefined order on an accelerator.
    for statistics, head_positions in heads:
        sums.index_add_(0, head_positions, statistics)
        counts.index_add_(0, head_positions, torch.ones_like(statistics))
    return sums / counts
