"""Latest activations of a sequence: last hidden state and recent queries, beside its entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from larder.core.observation import LatestQueries
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Positions, Queries

TAIL = "tail"  # names in a state
LATEST = "latest."
POSITION_BYTES = 8


class LatestActivations:
    """Model output of the last token, and the latest queries of each layer.

    Args:
        num_queries: queries held per layer; 0 for none.
    """

    def __init__(self, num_queries: int = 0) -> None:
        self.tail = torch.empty(0)
        self._num_queries = num_queries
        self._queries: dict[int, LatestQueries] = {}
        self._query_bytes = 0

    def queries(self, layer: int) -> LatestQueries | None:
        """Latest queries of a layer; None before the first `record_queries`."""
        return self._queries.get(layer)

    def record_queries(self, layer: int, queries: Queries, positions: Positions) -> None:
        """Append the queries of a forward pass; the oldest beyond `num_queries` are dropped."""
        new = LatestQueries(queries, positions).last(self._num_queries)
        if (held := self._queries.get(layer)) is not None:
            new = held.extended(new).last(self._num_queries)
            self._query_bytes -= held.nbytes
        self._queries[layer] = new.clone()
        self._query_bytes += self._queries[layer].nbytes

    def truncate(self, length: int) -> None:
        """Drop tokens at true positions `length` and later."""
        self.tail = torch.empty(0)
        self._hold({i: held.before(length).clone() for i, held in self._queries.items()})

    def fork(self) -> LatestActivations:
        """Independent copy on tensors of its own."""
        copy = LatestActivations(self._num_queries)
        copy.tail = self.tail.clone()
        copy._hold({index: held.clone() for index, held in self._queries.items()})
        return copy

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes + self._query_bytes

    def _hold(self, queries: dict[int, LatestQueries]) -> None:
        self._queries = queries
        self._query_bytes = sum(held.nbytes for held in queries.values())

    def state(self) -> dict[str, Tensor]:
        """Copies of all tensors by name."""
        state = {TAIL: self.tail.clone()} if len(self.tail) else {}
        for index, held in self._queries.items():
            state[f"{index}.{LATEST}queries"] = held.queries.clone()
            state[f"{index}.{LATEST}positions"] = held.positions.clone()
        return state

    def release_state(self, device: torch.device) -> dict[str, Tensor]:
        """All tensors, moved to `device`; the object is empty afterwards."""
        moved = {name: tensor.to(device) for name, tensor in self.state().items()}
        self.tail = torch.empty(0)
        self._hold({})
        return moved

    @classmethod
    def restore(
        cls, state: Mapping[str, Tensor], num_queries: int, spec: ModelSpec
    ) -> LatestActivations:
        """Restored activations on tensors of their own."""
        held = cls(num_queries)
        if TAIL in state:
            held.tail = state[TAIL].to(spec.device, copy=True)
        queries_by_layer: dict[int, LatestQueries] = {}
        for name, queries in state.items():
            layer, _, what = name.partition(".")
            if what == f"{LATEST}queries":
                positions, device = state[f"{layer}.{LATEST}positions"], spec.device_of(int(layer))
                queries_by_layer[int(layer)] = LatestQueries(
                    queries.to(device, copy=True), positions.to(device, copy=True)
                )
        held._hold(queries_by_layer)
        return held


def is_latest_queries(name: str) -> bool:
    """True for tensor names of a layer's latest queries in a sequence's state."""
    return name.partition(".")[2].startswith(LATEST)


def latest_queries_bytes(num_queries: int, layers: Iterable[LayerSpec], itemsize: int) -> int:
    """Bytes of the latest queries of some layers, once `num_queries` tokens were read."""
    widths = [layer.query_heads * layer.head_dim * itemsize + POSITION_BYTES for layer in layers]
    return num_queries * sum(widths)
