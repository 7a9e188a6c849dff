"""Per-entry columns and per-head scalars that a policy's ledger keeps beside keys and values,
and the latest activations of a sequence: its last hidden state and recent queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.observation import LatestQueries
from larder.core.part import Ledger
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Positions, Queries

_COLUMN, _SCALAR = "column.", "scalar."
TAIL = "tail"  # names in a state
LATEST = "latest."
POSITION_BYTES = 8


class EntryColumns:
    """Float32 columns over the rows of a layer's storage, and scalars per kv head.

    The owner replaces `values` [n, C] whenever it relocates its storage.
    """

    def __init__(self, ledger: Ledger, kv_heads: int, device: torch.device) -> None:
        self.ledger = ledger
        self.values = torch.zeros(len(ledger.columns), 0, device=device)
        self._scalars = torch.full((len(ledger.scalars), kv_heads), torch.nan, device=device)

    def by_name(self) -> dict[str, Tensor]:
        """The columns [C], as views."""
        return dict(zip(self.ledger.columns, self.values, strict=True))

    @cached_property
    def scalars_by_name(self) -> Mapping[str, Tensor]:
        """The scalars [K], as views."""
        return dict(zip(self.ledger.scalars, self._scalars, strict=True))

    def clear(self, rows: Int[Tensor, " N"] | slice) -> None:
        """Zero all columns at the rows of new entries."""
        if len(self.values):
            self.values[:, rows] = 0.0

    def check_columns(self, columns: Mapping[str, Tensor], rows: int) -> None:
        """Check that columns fit `rows` rows.

        Raises:
            CacheError: a name that is not in the ledger, or a wrong number of values.
        """
        check_columns(columns, self.ledger, rows)

    def check_scalars(self, scalars: Mapping[str, Tensor]) -> None:
        """Check names and shapes of scalars.

        Raises:
            CacheError: see `check_columns`.
        """
        check_scalars(scalars, self.ledger, self._scalars.shape[1])

    def write(self, columns: Mapping[str, Float[Tensor, " _"]]) -> None:
        """Replace whole columns.

        Raises:
            CacheError: see `check_columns`; nothing is written.
        """
        self.check_columns(columns, self.values.shape[1])
        for name, numbers in columns.items():
            self.values[self.ledger.columns.index(name)] = numbers

    def write_rows(
        self, rows: Int[Tensor, " T"], columns: Mapping[str, Float[Tensor, " T"]]
    ) -> None:
        """Replace some rows of columns that passed `check_columns`."""
        for name, numbers in columns.items():
            self.values[self.ledger.columns.index(name), rows] = numbers

    def write_scalars(self, scalars: Mapping[str, Float[Tensor, " K"]]) -> None:
        """Replace scalars that passed `check_scalars`."""
        for name, numbers in scalars.items():
            self._scalars[self.ledger.scalars.index(name)] = numbers

    def state(self, rows: Int[Tensor, " T"]) -> dict[str, Tensor]:
        """Copies of columns (at the given rows) and scalars, by saved name."""
        columns = {_COLUMN + name: held[rows] for name, held in self.by_name().items()}
        scalars = {_SCALAR + name: held.clone() for name, held in self.scalars_by_name.items()}
        return columns | scalars

    def beside(self, values: Float[Tensor, "n C"]) -> EntryColumns:
        """Copy with other columns and the same scalars."""
        copy = EntryColumns(self.ledger, self._scalars.shape[1], self._scalars.device)
        copy.values, copy._scalars = values, self._scalars.clone()
        return copy

    @classmethod
    def adopt(cls, state: Mapping[str, Tensor], kv_heads: int, rows: int) -> EntryColumns:
        """Columns and scalars from a layer's saved state; other tensors are ignored."""
        columns = sorted(name for name in state if name.startswith(_COLUMN))
        scalars = sorted(name for name in state if name.startswith(_SCALAR))
        ledger = Ledger(
            tuple(name.removeprefix(_COLUMN) for name in columns),
            tuple(name.removeprefix(_SCALAR) for name in scalars),
        )
        held = cls(ledger, kv_heads, state["positions"].device)
        held.values = held.values.new_zeros(len(columns), rows)
        for index, name in enumerate(columns):
            held.values[index] = state[name]
        for index, name in enumerate(scalars):
            held._scalars[index] = state[name]
        return held

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that are not empty."""
        return tuple(held for held in (self.values, self._scalars) if held.numel())


def column_names(state: Iterable[str]) -> list[str]:
    """Names of columns and scalars among the tensor names of a layer's state."""
    kinds = (_COLUMN, _SCALAR)
    return [name.removeprefix(kind) for name in state for kind in kinds if name.startswith(kind)]


def check_columns(columns: Mapping[str, Tensor], ledger: Ledger, rows: int) -> None:
    """Check that columns fit a ledger and `rows` rows.

    Raises:
        CacheError: a name that is not in the ledger, or a wrong number of values.
    """
    _check(columns, ledger.columns, rows, "row")


def check_scalars(scalars: Mapping[str, Tensor], ledger: Ledger, kv_heads: int) -> None:
    """Check that scalars fit a ledger and `kv_heads` kv heads.

    Raises:
        CacheError: a name that is not in the ledger, or a wrong number of values.
    """
    _check(scalars, ledger.scalars, kv_heads, "kv head")


def _check(numbers: Mapping[str, Tensor], known: tuple[str, ...], count: int, each: str) -> None:
    for name, given in numbers.items():
        if name not in known:
            raise CacheError(
                f"The cache holds no {name!r} (it holds: {', '.join(known) or 'nothing'}): name it "
                "in the ledger of the part that writes it."
            )
        if given.shape != (count,):
            raise CacheError(
                f"{name!r} has shape {list(given.shape)}, but one number per {each} is [{count}]: "
                "give that many."
            )


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
