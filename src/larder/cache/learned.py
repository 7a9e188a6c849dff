"""The index of a tier that grows: what it has learned of, and who shares it.

Forks share one index until one of them has more to tell it; that one takes a copy of its own. An
index in which looking leaves traces is copied at once.
"""

from __future__ import annotations

from weakref import WeakSet

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Entries
from larder.core.recall import SAMPLE_ENTRIES, RecallIndex, RecallPart
from larder.core.spec import LayerSpec


class SharedIndex:
    """An index, and how many entries of each head it knows.

    Args:
        index: one that knows `known` entries of each head; an empty one by default.
    """

    def __init__(
        self,
        recall: RecallPart,
        layer: LayerSpec,
        index: RecallIndex | None = None,
        known: tuple[int, ...] = (),
    ) -> None:
        self._recall, self._layer = recall, layer
        self.index = recall.index(layer) if index is None else index
        self.known = known or (0,) * layer.kv_heads
        self._each = 0.0  # bytes of the index for an entry, about; 0 where nobody has asked
        self._sharers: WeakSet[SharedIndex] = WeakSet([self])

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

    def fork(self) -> SharedIndex:
        """One that answers alike and goes its own way."""
        is_steady = self.index.is_steady
        index = self.index if is_steady else self._copied()
        copy = SharedIndex(self._recall, self._layer, index, self.known)
        if is_steady:
            self._sharers.add(copy)
            copy._sharers = self._sharers
        return copy

    @property
    def is_used(self) -> bool:
        """Whether the index knows anything."""
        return any(self.known)

    @property
    def nbytes(self) -> int:
        """Bytes of the index."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.index.tensors())

    def foreseen_nbytes(self, entries: int) -> int:
        """About what the index will have grown by when it knows so many entries of all heads."""
        known = sum(self.known)
        if known < SAMPLE_ENTRIES * len(self.known):
            self._each = self._each or self._recall.entry_bytes(self._layer)
            return max(0, int(self._each * entries) - self.nbytes)
        return self.nbytes * max(0, entries - known) // known

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the index where others hold it as well."""
        return self.nbytes if self._is_shared else 0

    @property
    def _is_shared(self) -> bool:
        return len(self._sharers) > 1

    def _copied(self) -> RecallIndex:
        return self._recall.adopt(self._layer, self.index.state())

    def _own(self, index: RecallIndex) -> None:
        self._sharers.discard(self)
        self.index, sharers = index, WeakSet[SharedIndex]()
        sharers.add(self)
        self._sharers = sharers
