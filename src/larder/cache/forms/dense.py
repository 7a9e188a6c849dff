"""Dense layer: all heads hold the same positions, in preallocated storage.

    keys   [ head 0: entries, slack | head 1: entries, slack | ... ]      [K, C, D]

One row of positions serves all heads, so a plan must keep the same entries in each.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.spec import CacheSpec
from larder.cache.validation import check_kept, check_single_precision
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Keys, Mode, Positions, Queries, Values
from larder.ops.attention import ragged_attention
from larder.ops.removal import remove_rows

GROWTH = 4  # storage grows by a quarter when a caller appends without a reservation
MIN_GROWTH_TOKENS = 64


class DenseLayer(CacheLayer):
    """Layer storage with the same entries in every head."""

    supports = frozenset[str]()

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
        shape = (layer.kv_heads, 0, layer.head_dim)
        super().__init__(layer)
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self._positions = torch.empty(0, dtype=torch.int32, device=device)
        self._length = 0
        self._count_bytes()

    @classmethod
    def create(cls, layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> DenseLayer:
        return cls(layer, model.dtype, model.device)

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        start, stop = self._length, self._length + keys.shape[1]
        self.replaced_bytes = 0
        if stop > self._capacity:
            self._resize(max(stop + MIN_GROWTH_TOKENS, stop + stop // GROWTH))
        self._keys[:, start:stop] = keys
        self._values[:, start:stop] = values
        self._positions[start:stop] = positions
        self._set_length(stop)

    def apply(self, plan: Plan) -> None:
        rows = self._chosen(plan).to(self._keys.device)
        keys, values, positions = self._keys[:, rows], self._values[:, rows], self._positions[rows]
        self._replace(keys, values, positions)
        self._set_length(len(rows))

    def evict(self, plan: Plan) -> None:
        rows = self._chosen(plan)
        positions = self._positions[rows.to(self._positions.device)]
        keys, values = (t.view(-1, self.layer.head_dim) for t in (self._keys, self._values))
        self.replaced_bytes = 0
        remove_rows((keys, values), *self._layout(), plan.kept.cpu(), plan.lengths)
        self._positions[: len(rows)] = positions
        self._set_length(len(rows))

    def allocate(self, room: int) -> None:
        if self._length + room > self._capacity:
            self._resize(self._length + room)

    def compact(self) -> None:
        if self._length < self._capacity:
            self._resize(self._length)

    def truncate(self, length: int) -> None:
        self._set_length(int((self._positions[: self._length] < length).sum()))

    def entries(self) -> Entries:
        starts, lengths = self._layout()
        return Entries(
            self._keys.flatten(0, 1),
            self._values.flatten(0, 1),
            self._positions.repeat(self.layer.kv_heads),
            tuple(starts.tolist()),
            tuple(lengths.tolist()),
        )

    def state(self) -> dict[str, Tensor]:
        return {
            "keys": self._keys[:, : self._length].clone(),
            "values": self._values[:, : self._length].clone(),
            "positions": self._positions[: self._length].clone(),
        }

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> DenseLayer:
        store = cls(layer, state["keys"].dtype, state["keys"].device)
        store._keys, store._values = state["keys"], state["values"]
        store._positions = state["positions"]
        store._count_bytes()
        store._set_length(len(store._positions))
        return store

    def own_tensors(self) -> tuple[Tensor, ...]:
        return self._keys, self._values, self._positions

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._length,) * self.layer.kv_heads

    @property
    def _capacity(self) -> int:
        return self._keys.shape[1]

    def _chosen(self, plan: Plan) -> Tensor:
        """Entries that a plan keeps in every head, on the host."""
        check_single_precision(plan)
        check_kept(plan, self.lengths)
        if len(plan.folds) or plan.columns or plan.scalars:
            raise CacheError(
                "A dense cache neither merges entries nor has columns, but the plan requests "
                "it: use a ragged cache."
            )
        heads = plan.kept.cpu().split(plan.lengths)
        chosen = [part - head * self._length for head, part in enumerate(heads)]
        if any(not torch.equal(part, chosen[0]) for part in chosen):
            raise CacheError(
                "A dense cache holds the same entries in every head, but the plan keeps different "
                "ones: use a ragged cache."
            )
        return chosen[0]

    def attention_calls(
        self, queries: Queries, positions: Positions, mode: Mode, shift: int
    ) -> list[AttentionCall]:
        del positions, mode, shift
        rows = self._keys.flatten(0, 1), self._values.flatten(0, 1)
        layout, softcap = (*self._layout(), self.layer.scaling), self.layer.softcap
        return [partial(ragged_attention, queries, *rows, *layout, softcap=softcap)]

    def _layout(self) -> tuple[Tensor, Tensor]:
        heads = torch.arange(self.layer.kv_heads)
        return heads * self._capacity, torch.full_like(heads, self._length)

    def _resize(self, capacity: int) -> None:
        length, keys, values = self._length, self._keys, self._values
        shape = (self.layer.kv_heads, capacity, self.layer.head_dim)
        new_keys, new_values = keys.new_empty(shape), values.new_empty(shape)
        new_keys[:, :length] = keys[:, :length]
        new_values[:, :length] = values[:, :length]
        positions = self._positions.new_zeros(capacity)
        positions[:length] = self._positions[:length]
        self._replace(new_keys, new_values, positions)

    def _replace(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.replaced_bytes = self.nbytes
        self._keys, self._values, self._positions = keys, values, positions
        self._count_bytes()

    def _set_length(self, length: int) -> None:
        self._length = length
        self.usage.set_entries(length * self.layer.kv_heads)


Part = DenseLayer
