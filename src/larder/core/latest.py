"""The latest queries of a layer, held for policies that judge by what these look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.types import Positions, Queries


@dataclass(frozen=True)
class LatestQueries:
    """Post-RoPE queries of the last tokens that a layer read, oldest first.

    Args:
        positions: their true positions.
    """

    queries: Float[Tensor, "H N D"]
    positions: Int[Tensor, " N"]

    @staticmethod
    def of(queries: Queries, positions: Positions) -> LatestQueries:
        """Those of a pass, by reference."""
        return LatestQueries(queries, positions)

    def followed(self, later: LatestQueries) -> LatestQueries:
        """These, then later ones."""
        queries = torch.cat([self.queries, later.queries.to(self.queries)], 1)
        return LatestQueries(queries, torch.cat([self.positions, later.positions]))

    def last(self, count: int) -> LatestQueries:
        """The last so many, or all where there are fewer."""
        first = max(0, len(self.positions) - count)
        return LatestQueries(self.queries[:, first:], self.positions[first:])

    def before(self, position: int) -> LatestQueries:
        """Those of tokens at earlier true positions."""
        count = int((self.positions < position).sum())
        return LatestQueries(self.queries[:, :count], self.positions[:count])

    def copied(self) -> LatestQueries:
        """The same on tensors of its own."""
        return LatestQueries(self.queries.clone(), self.positions.clone())

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors, with what they are views of."""
        held = (self.queries, self.positions)
        return sum(tensor.untyped_storage().nbytes() for tensor in held)
