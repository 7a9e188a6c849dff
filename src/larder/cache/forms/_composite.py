"""A layer that holds some entries as they are, and others in another manner."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from larder.cache.forms.base import AttentionState, CacheLayer
from larder.cache.forms.ragged import RaggedLayer
from larder.core.ledger import LOG_COUNT
from larder.core.spec import POSITION_BYTES
from larder.core.types import Positions, Queries
from larder.ops.merging import merge_attention

COLUMN_BYTES = 4  # of a number of the ledger
GRADE_BYTES = 1  # of a grade in what `entries` shows


class CompositeLayer(CacheLayer):
    """New entries come into a ragged tier; a form says what else there is, and how it is attended.

    What `entries` shows is a copy as soon as anything is held in another manner.
    """

    _finest: RaggedLayer

    @property
    @abstractmethod
    def _is_mixed(self) -> bool:
        """Whether anything is held in another manner than the ragged tier's."""

    @abstractmethod
    def _attended(self, queries: Queries) -> Iterator[AttentionState]:
        """Attention to each part of what is held in another manner."""

    def allocate(self, room: int) -> None:
        self._finest.allocate(room)

    def compact(self) -> None:
        self._finest.compact()

    @property
    def viewed_bytes(self) -> int:
        if not self._is_mixed:
            return 0
        numbers = 2 * self.layer.head_dim * self._finest.entries().keys.itemsize
        remembered = COLUMN_BYTES * len(self._finest.ledger.columns)
        return sum(self.lengths) * (numbers + POSITION_BYTES + GRADE_BYTES + remembered)

    @property
    def finest_lengths(self) -> tuple[int, ...]:
        return self._finest.lengths

    @property
    def _bias_column(self) -> int | None:
        """Which column of the ledger attention adds to the logits; None where there is none."""
        names = self._finest.ledger.columns
        return names.index(LOG_COUNT) if LOG_COUNT in names else None

    def _attention(
        self, queries: Queries, positions: Positions, own: int, shift: int
    ) -> AttentionState:
        del positions, own, shift
        parts = list(self._attended(queries))
        if any(self._finest.lengths) or not parts:
            parts.insert(0, self._finest.cached(queries))
        return merge_attention([out for out, _ in parts], [lse for _, lse in parts])
