"""A list of entries per head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from larder.cache import NewTokens
from larder.core import LayerSpec
from references.cache.folding import Fold, folded
from references.cache.loop import Entry, attend


class RaggedLoop:
    exact = True  # what it shows is what was appended, to the bit

    def __init__(self, layer: LayerSpec) -> None:
        self.layer = layer
        self.heads: list[list[Entry]] = [[] for _ in range(layer.kv_heads)]

    def attend(self, new: NewTokens) -> Tensor:
        sides = new.queries, new.keys, new.values, new.positions
        return attend(self.heads, *sides, new.section_lengths, self.layer)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        for head, entries in enumerate(self.heads):
            for q, position in enumerate(positions.tolist()):
                entries.append(Entry(position, keys[head, q], values[head, q]))

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        self.heads = [
            [entries[index] for index in indices]
            for entries, indices in zip(self.heads, chosen, strict=True)
        ]

    def shown(self) -> list[list[Entry]]:
        """Entries as a store hands them out."""
        return self.heads

    def fold(self, chosen: Sequence[Sequence[int]], folds: Sequence[Fold]) -> None:
        """Keep what is chosen, targets as the sums of their rows."""
        self.heads = folded(self.heads, chosen, folds)
