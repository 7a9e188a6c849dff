"""Base class of tallies: running statistics of every entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation
from larder.core.part import PolicyPart
from larder.core.plan import StepColumn


class Tally(PolicyPart, ABC):
    """Running statistic of every entry, in ledger columns of the cache.

    Updated after every appending pass of prefill and decode; scratch passes do not change it. A new
    entry starts at 0.
    """

    columns: ClassVar[tuple[str, ...]]
    # Each column as a kernel updates it in a decode step; none if it cannot.
    step_columns: ClassVar[tuple[StepColumn, ...]] = ()
    # Whether it uses `Observation.weight_sums` where they were recorded.
    sums_weights: ClassVar[bool] = False

    @abstractmethod
    def update(self, observation: Observation) -> dict[str, Float[Tensor, " C"]]:
        """New column values, one per storage row, from those in `observation`."""
