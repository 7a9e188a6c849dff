"""A layer that holds some entries as they are, and others in another manner."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping

from jaxtyping import Float
from torch import Tensor

from larder.cache.forms.base import AttentionState, CacheLayer
from larder.cache.forms.ragged import RaggedLayer
from larder.core.ledger import LOG_COUNT
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import POSITION_BYTES
from larder.core.types import Keys, Positions, Queries, Values
from larder.ops.attention import merge_attention

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
    def entries_copy_bytes(self) -> int:
        if not self._is_mixed:
            return 0
        numbers = 2 * self.layer.head_dim * self._finest.entries().keys.itemsize
        remembered = COLUMN_BYTES * len(self._finest.ledger.columns)
        return sum(self.lengths) * (numbers + POSITION_BYTES + GRADE_BYTES + remembered)

    @property
    def full_precision_lengths(self) -> tuple[int, ...]:
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


class RecoverableLayer(CacheLayer):
    """A ragged part, `_fast`, in front of what is rejected; that part alone is a policy's."""

    _fast: RaggedLayer

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        self._fast.append(keys, values, positions)
        self.replaced_bytes = self._fast.replaced_bytes

    def record_logits(self) -> None:
        self._fast.record_logits()

    def heard(self) -> Float[Tensor, "R C"] | None:
        return self._fast.heard()

    def apply(self, plan: Plan) -> None:
        self._carry_out(plan, self._fast.apply)

    def evict(self, plan: Plan) -> None:
        self._carry_out(plan, self._fast.evict)

    def note(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        self._fast.note(columns)

    def allocate(self, room: int) -> None:
        self._fast.allocate(room)

    def compact(self) -> None:
        self._fast.compact()

    def entries(self) -> Entries:
        """What the ragged part holds; the rest is beyond a policy's reach."""
        return self._fast.entries()

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._fast.lengths

    @abstractmethod
    def _carry_out(self, plan: Plan, change: Callable[[Plan], None]) -> None:
        """Put aside what a plan rejects, and change the ragged part.

        Args:
            change: what the ragged part does with the plan.
        """
