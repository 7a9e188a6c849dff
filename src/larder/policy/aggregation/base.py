"""What every aggregation can be asked: many queries' weights, one number per entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor


class Aggregation(ABC):
    """Joins the softmax weights that an entry gets from many queries of one query head.

    A frozen dataclass. Weights come a few queries at a time, in order, so that they are never all
    held; what is carried between is the state. A query that cannot see an entry gives it 0.
    """

    # Whether what an entry gets depends on the weights of other entries, so that those that are
    # not judged must not be among them.
    depends_on_other_entries: ClassVar[bool] = False
    # Whether it depends on how many entries a query sees, so that heads must be shown apart.
    counts: ClassVar[bool] = False

    @abstractmethod
    def start(self, like: Float[Tensor, "R S"]) -> tuple[Tensor, ...]:
        """The state before any query, for R query heads and S entries."""

    @abstractmethod
    def fold(
        self, state: tuple[Tensor, ...], weights: Float[Tensor, "R c S"], first: int, total: int
    ) -> None:
        """Take c more queries into the state, in place.

        Args:
            first: number of the first of them.
            total: queries that there are in all.
        """

    def alone(self, weights: Float[Tensor, "R S"]) -> Float[Tensor, "R S"]:
        """What becomes of the weights of a single query."""
        state = self.start(weights)
        self.fold(state, weights[:, None], 0, 1)
        return self.finish(state, 1)

    @abstractmethod
    def finish(self, state: tuple[Tensor, ...], total: int) -> Float[Tensor, "R S"]:
        """One number per entry and query head, after all `total` queries."""

    def complete(self, scores: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """What becomes of the numbers of a kv head's judged entries once query heads are joined."""
        return scores
