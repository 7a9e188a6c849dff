"""Base classes of layers that combine a ragged part with entries held elsewhere."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor

from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.forms.ragged import RaggedLayer
from larder.cache.memory_usage import TensorOwner
from larder.core.ledger import LOG_COUNT
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.types import Keys, Mode, Positions, Queries, Values

COLUMN_BYTES = 4  # of a number of the ledger
GRADE_BYTES = 1  # of a grade in what `entries` shows


class CompositeLayer(CacheLayer):
    """Ragged tier for new entries, beside other storage that a subclass defines.

    `entries` returns a copy as soon as the other storage holds any entry.
    """

    def __init__(self, layer: LayerSpec, finest: RaggedLayer) -> None:
        super().__init__(layer)
        self._finest = self._attach(finest)

    @property
    def parts(self) -> tuple[TensorOwner, ...]:
        return (self._finest,)

    @property
    @abstractmethod
    def _is_mixed(self) -> bool:
        """True if any entry is outside the ragged tier."""

    @abstractmethod
    def _other_calls(self, queries: Queries) -> list[AttentionCall]:
        """Kernel calls for the entries outside the ragged tier."""

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
        """Index of the ledger column that attention adds to the logits; None if there is none."""
        names = self._finest.ledger.columns
        return names.index(LOG_COUNT) if LOG_COUNT in names else None

    def attention_calls(
        self, queries: Queries, positions: Positions, mode: Mode, shift: int
    ) -> list[AttentionCall]:
        calls = self._other_calls(queries)
        if any(self._finest.lengths) or not calls:
            calls = self._finest.attention_calls(queries, positions, mode, shift) + calls
        return calls


class RecoverableLayer(CacheLayer):
    """Ragged part `_fast`, visible to policies, in front of recoverable rejected entries."""

    def __init__(self, layer: LayerSpec, fast: RaggedLayer) -> None:
        super().__init__(layer)
        self._fast = self._attach(fast)

    @property
    def parts(self) -> tuple[TensorOwner, ...]:
        return (self._fast,)

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
        """Entries of the ragged part; policies do not see the rest."""
        return self._fast.entries()

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._fast.lengths

    @abstractmethod
    def _carry_out(self, plan: Plan, change: Callable[[Plan], None]) -> None:
        """Store what a plan rejects, and change the ragged part.

        Args:
            change: applies the plan to the ragged part.
        """
