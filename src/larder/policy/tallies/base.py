"""What every tally can be asked: how numbers per entry go on as more queries are seen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation


class Tally(ABC):
    """A running statistic of every entry, held by the cache in columns of these names.

    It is brought up to date after every pass that appends, while reading and while generating;
    scratch passes leave it alone. A new entry starts at 0.
    """

    columns: ClassVar[tuple[str, ...]]

    @abstractmethod
    def update(self, seen: Observation) -> dict[str, Float[Tensor, " C"]]:
        """New values of its columns, one per row of the storage, from the old ones in `seen`."""
