"""What stores have in common whose kept entries are ragged, and whose rejected ones come back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor

from larder.cache.forms.base import CacheLayer
from larder.cache.forms.ragged import RaggedLayer
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.types import Keys, Positions, Values


class RecoverableLayer(CacheLayer):
    """A ragged part, `_fast`, in front of what is rejected; that part alone is a policy's."""

    _fast: RaggedLayer

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        self._fast.append(keys, values, positions)
        self.replaced_bytes = self._fast.replaced_bytes

    def listen(self) -> None:
        self._fast.listen()

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
