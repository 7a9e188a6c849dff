"""The index of a tier that grows: what it has learned of, and who shares it.

Forks share one index until one of them has more to tell it; that one takes a copy of its own. An
index in which looking leaves traces is copied at once.
"""

from __future__ import annotations

from weakref import WeakSet

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Entries
from larder.core.recall import Index, Recall
from larder.core.spec import LayerSpec


class Learned:
    """An index, and how many entries of each head it knows.

    Args:
        index: one that knows `known` entries of each head; an empty one by default.
    """

    def __init__(
        self,
        recall: Recall,
        layer: LayerSpec,
        index: Index | None = None,
        known: tuple[int, ...] = (),
    ) -> None:
        self._recall, self._layer = recall, layer
        self.index = recall.index(layer) if index is None else index
        self.known = known or (0,) * layer.kv_heads
        self._sharers: WeakSet[Learned] = WeakSet([self])

    def learn(self, entries: Entries, observed: Float[Tensor, "H Q D"] | None) -> None:
        """Have it take in what came since it last looked; broken off, it knows nothing at all."""
        if self.known == entries.lengths:
            return
        if self._is_shared:
            self._own(self._copied())
        try:
            self.index.add(entries, observed)
        except BaseException:  # it may know half of them
            self._own(self._recall.index(self._layer))
            self.known = (0,) * self._layer.kv_heads
            raise
        self.known = entries.lengths

    def fork(self) -> Learned:
        """One that answers alike and goes its own way."""
        is_steady = self.index.is_steady
        index = self.index if is_steady else self._copied()
        copy = Learned(self._recall, self._layer, index, self.known)
        if is_steady:
            self._sharers.add(copy)
            copy._sharers = self._sharers
        return copy

    @property
    def is_used(self) -> bool:
        """Whether the index knows anything."""
        return any(self.known)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the index where others hold it as well."""
        shared = self.index.tensors() if self._is_shared else ()
        return sum(tensor.untyped_storage().nbytes() for tensor in shared)

    @property
    def _is_shared(self) -> bool:
        return len(self._sharers) > 1

    def _copied(self) -> Index:
        return self._recall.adopt(self._layer, self.index.state())

    def _own(self, index: Index) -> None:
        self._sharers.discard(self)
        self.index, sharers = index, WeakSet[Learned]()
        sharers.add(self)
        self._sharers = sharers
