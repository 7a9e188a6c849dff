"""Base class of aggregations: reduction of attention weights over queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from larder.core.types import WeightChunk


class Aggregation(ABC):
    """Reduction of the softmax weights of many queries of a query head to one number per entry.

    A frozen dataclass. Weights arrive in order, a chunk of queries at a time, and fold into a
    state, so that the full matrix is never held. A query that cannot see an entry gives it 0.
    """

    # Whether the result of an entry depends on the weights of others, so that entries that are not
    # scored must be left out.
    depends_on_other_entries: ClassVar[bool] = False
    # Whether it depends on the number of entries that a query sees, so that heads are passed
    # separately.
    depends_on_visible_count: ClassVar[bool] = False

    def start(self, like: Float[Tensor, "R S"]) -> tuple[Tensor, ...]:
        """Initial state for R query heads and S entries; a zero for each by default."""
        return (like.new_zeros(like.shape),)

    @abstractmethod
    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        """Fold c more queries into the state, in place.

        Args:
            first: index of the first of them.
            total: total number of queries.
        """

    def single_query(self, weights: Float[Tensor, "R S"]) -> Float[Tensor, "R S"]:
        """Result for the weights of a single query."""
        state = self.start(weights)
        self.fold(state, weights[:, None], 0, 1)
        return self.finish(state, 1)

    def finish(self, state: tuple[Tensor, ...], total: int) -> Float[Tensor, "R S"]:
        """Result per entry and query head, after all `total` queries; the state by default."""
        return state[0]

    def complete(self, scores: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Final scores of a kv head's scored entries, after the head rule; unchanged by default."""
        return scores
