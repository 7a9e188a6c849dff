"""Base of storages with exact ends of the text and coded entries between, in a byte budget."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Int8
from torch import Tensor

from larder.core.codec import TIER_GRADE
from larder.core.errors import BudgetError
from larder.core.memory_budget import count_of_tokens
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.spelling import spell
from larder.policy.storage.base import Storage

OVERHEAD_BYTES = 0.75  # of a coded entry beside its components: position, share of a block


class ExactEndsStorage(Storage):
    """Base of storages with sinks and the latest entries exact and all others coded.

    Attributes:
        sinks: first positions of a text that stay exact, where they are kept.
        recent: latest positions that stay exact, where they are kept.
    """

    sinks: int
    recent: int

    @abstractmethod
    def coded_bytes(self, head_dim: int) -> float:
        """Bytes of a coded entry."""

    @property
    def exact_entries(self) -> int:
        """Entries per head that stay exact."""
        return self.sinks + self.recent

    def required_calibrations(self) -> frozenset[str]:
        assert self.transform is not None  # of every such storage
        return frozenset({self.transform.calibration})

    def entries(self, tokens: int, layers: Sequence[LayerSpec], itemsize: int) -> int:
        self.check(layers, itemsize)
        if tokens <= self.exact_entries:
            raise BudgetError(
                f"The budget of {count_of_tokens(tokens)} is no more than the "
                f"{self.exact_entries} that "
                f"{spell(self)} keeps exact: raise the budget, or lower sinks or recent."
            )
        gains = [self._gain(layer.head_dim, itemsize) for layer in layers]
        return self.exact_entries + int((tokens - self.exact_entries) * min(gains, default=1.0))

    def check(self, layers: Sequence[LayerSpec], itemsize: int) -> None:
        """Check that a coded entry takes fewer bytes than an exact one.

        Raises:
            BudgetError: it takes as many.
        """
        for size in {layer.head_dim for layer in layers}:
            if self._gain(size, itemsize) <= 1:
                bits = 4 * self.coded_bytes(size) / size
                raise BudgetError(
                    f"{spell(self)} codes a number in {bits:.3g} bits, but at full precision it "
                    f"takes {8 * itemsize}: lower bits, or leave the storage out."
                )

    def full_precision_entries(self, quota: int, layer: LayerSpec, itemsize: int) -> int:
        coded = max(quota - self.exact_entries, 0) / self._gain(layer.head_dim, itemsize)
        return min(quota, self.exact_entries) + int(coded)

    def grades(self, plan: Plan, entries: Entries) -> Int8[Tensor, " K"]:
        """Grade of each kept entry: 0 at the ends of the text."""
        positions = entries.packed_positions()
        length = int(positions.max()) + 1 if len(positions) else 0
        is_exact = (positions < self.sinks) | (positions >= length - self.recent)
        return torch.where(is_exact[plan.kept], 0, TIER_GRADE).to(torch.int8)

    def quota_bytes(self, quota: int, head_dim: int, itemsize: int) -> float:
        """Bytes of `quota` entries of a head, at full precision and coded."""
        exact = min(quota, self.exact_entries)
        coded = (quota - exact) * self.coded_bytes(head_dim)
        return exact * _full_bytes(head_dim, itemsize) + coded

    def _gain(self, head_dim: int, itemsize: int) -> float:
        """Coded entries in the bytes of an exact one."""
        return _full_bytes(head_dim, itemsize) / self.coded_bytes(head_dim)


def _full_bytes(head_dim: int, itemsize: int) -> int:
    return 2 * head_dim * itemsize + POSITION_BYTES
