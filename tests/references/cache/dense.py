"""A list of entries per head, of which every head keeps the same."""

from __future__ import annotations

from collections.abc import Sequence

from references.cache.ragged import RaggedLoop


class DenseLoop(RaggedLoop):
    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        if any(list(indices) != list(chosen[0]) for indices in chosen):
            raise ValueError("heads keep different entries")
        super().keep(chosen)
