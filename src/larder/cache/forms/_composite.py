"""Base classes of layers that combine a ragged part with entries held elsewhere."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor

from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.forms.ragged import RaggedLayer
from larder.cache.memory_usage import ForkFamily, TensorOwner
from larder.cache.new_tokens import NewTokens
from larder.cache.spec import LayerOptions
from larder.core.observation import Entries
from larder.core.part import LOG_COUNT
from larder.core.plan import Plan
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.types import Keys, Positions, Queries, Values

COLUMN_BYTES = 4  # of a number of the ledger
GRADE_BYTES = 1  # of a grade in what `entries` shows

Layer = TypeVar("Layer", bound="CompositeLayer")


class CompositeLayer(CacheLayer):
    """Ragged part for new entries, beside entries held elsewhere that a subclass defines.

    A fork shares both. The ragged part is copied when it is written; the tensors beside it are
    replaced and never written.
    """

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        super().__init__(layer)
        self.options, self._ragged = options, self._attach(RaggedLayer(layer, options))
        self._family = ForkFamily(self)

    @property
    def parts(self) -> tuple[TensorOwner, ...]:
        return (self._ragged,)

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        self._ragged.append(keys, values, positions)
        self.replaced_bytes = self._ragged.replaced_bytes

    def allocate(self, room: int) -> None:
        self._ragged.allocate(room)

    def compact(self) -> None:
        self._ragged.compact()

    def fork(self: Layer) -> Layer:
        copy = self._like()
        assert isinstance(copy, type(self))  # as each form promises
        copy._ragged = copy._attach(self._ragged.fork(), copy._ragged)
        copy._family = self._family
        copy._family.join(copy)
        return copy

    @property
    def shared_nbytes(self) -> int:
        return self._ragged.shared_nbytes + self._family.shared_bytes(self)

    def separate(self) -> None:
        self._ragged.separate()
        if self._family.shared_bytes(self):
            self._copy_tensors()

    def _like(self) -> CompositeLayer:
        """Layer of the same form and options, which holds the same but for the ragged part."""
        return type(self)(self.layer, self.options)

    @abstractmethod
    def _copy_tensors(self) -> None:
        """Replace the tensors beside the ragged part by copies, slow tiers excluded."""

    def _adopt_ragged(self, state: dict[str, Tensor]) -> None:
        """Replace the ragged part by that of a saved state."""
        self._ragged = self._attach(RaggedLayer.adopt(self.layer, state), self._ragged)
        self.options = self.options.with_ledger(self._ragged.ledger)


class MixedLayer(CompositeLayer):
    """Ragged part beside entries in another form; policies see both.

    `entries` returns a copy as soon as the other storage holds any entry.
    """

    @property
    @abstractmethod
    def _is_mixed(self) -> bool:
        """True if any entry is outside the ragged part."""

    @abstractmethod
    def _other_calls(self, queries: Queries) -> list[AttentionCall]:
        """Kernel calls for the entries outside the ragged part."""

    @property
    def entries_copy_bytes(self) -> int:
        if not self._is_mixed:
            return 0
        numbers = 2 * self.layer.head_dim * self._ragged.entries().keys.itemsize
        columns = COLUMN_BYTES * len(self._ragged.ledger.columns)
        return sum(self.lengths) * (numbers + POSITION_BYTES + GRADE_BYTES + columns)

    @property
    def full_precision_lengths(self) -> tuple[int, ...]:
        return self._ragged.lengths

    @property
    def _bias_column(self) -> int | None:
        """Index of the ledger column that attention adds to the logits; None if there is none."""
        names = self._ragged.ledger.columns
        return names.index(LOG_COUNT) if LOG_COUNT in names else None

    def attention_calls(self, new: NewTokens) -> list[AttentionCall]:
        calls = self._other_calls(new.queries)
        if any(self._ragged.lengths) or not calls:
            calls = self._ragged.attention_calls(new) + calls
        return calls

    def block_call(self, new: NewTokens) -> AttentionCall | None:
        return None if self._is_mixed else self._ragged.block_call(new)


class RecoverableLayer(CompositeLayer):
    """Ragged part, which policies see, in front of rejected entries that are recovered."""

    def record_logits(self) -> None:
        self._ragged.record_logits()

    def take_logits(self) -> Float[Tensor, "R C"] | None:
        return self._ragged.take_logits()

    def apply(self, plan: Plan) -> None:
        self._carry_out(plan, self._ragged.apply)

    def evict(self, plan: Plan) -> None:
        self._carry_out(plan, self._ragged.evict)

    def write_columns(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        self._ragged.write_columns(columns)

    def entries(self) -> Entries:
        """Entries of the ragged part; policies do not see the rest."""
        return self._ragged.entries()

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._ragged.lengths

    @abstractmethod
    def _carry_out(self, plan: Plan, change: Callable[[Plan], None]) -> None:
        """Store what a plan rejects, and change the ragged part.

        Args:
            change: applies the plan to the ragged part.
        """
