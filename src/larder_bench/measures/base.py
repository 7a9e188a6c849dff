"""Base of measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from larder.core import MemoryBudget
from larder_bench.results.rows import Row
from larder_bench.studies.cells import Cell
from larder_bench.studies.model_context import ModelContext


class Measure(ABC):
    """Measure of one cell of a study. Implementations are frozen dataclasses."""

    supports_inside: ClassVar[bool] = False  # questions inside the compressed context
    asks: ClassVar[bool] = False  # its items are of questions, and do not depend on later ones
    reads_each: ClassVar[bool] = False  # whether each question has prefills of its own

    def is_alike(self, amount: MemoryBudget) -> bool:
        """Test if a budget means the same for this measure under every matched quantity."""
        return False

    def brief(self) -> Self:
        """Measure with the same items that takes as few exhibits as it can."""
        return self

    @abstractmethod
    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        """Figures of the caches and items of a cell.

        Args:
            tokens_per_byte: of an earlier cell with the same policy; None if unknown.

        Raises:
            LarderError: the policy refuses; a refusal is a result, too.
        """
