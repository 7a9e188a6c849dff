"""Entries that are not stored as numbers, and become such only for who looks at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from larder.core.nothing import empty_tensor
from larder.core.observation import Entries


class KVField(Enum):
    """Which numbers of an entry, by the name that `Entries` has for them."""

    KEYS = "keys"
    VALUES = "values"


KV_FIELDS = {side.value: side for side in KVField}


class LazyEntries(Entries):
    """A copy of what a layer holds, whose keys and values are made when first asked for.

    Positions, columns and grades are there at once: many policies look at nothing else. As views
    are, it is valid until the layer changes.
    """

    _like: Tensor
    _made: Callable[[KVField], Tensor]

    @staticmethod
    def of(
        like: Float[Tensor, "0 D"],
        made: Callable[[KVField], Tensor],
        positions: Int32[Tensor, " T"],
        lengths: tuple[int, ...],
        columns: Mapping[str, Float[Tensor, " T"]],
        scalars: Mapping[str, Float[Tensor, " K"]],
        grades: Int8[Tensor, " T"],
    ) -> LazyEntries:
        """Packed entries, head by head.

        Args:
            made: all keys, or all values.
        """
        entries = object.__new__(
            LazyEntries
        )  # without keys and values, which would be made at once
        vars(entries).update(
            _like=like,
            _made=made,
            positions=positions,
            starts=tuple(sum(lengths[:head]) for head in range(len(lengths))),
            lengths=lengths,
            columns=columns,
            scalars=scalars,
            places=empty_tensor(torch.int32, 0),
            grades=grades,
        )
        return entries

    def __getattr__(self, name: str) -> Tensor:
        if name not in KV_FIELDS:
            raise AttributeError(name)
        vars(self)[name] = self._made(KV_FIELDS[name])
        return vars(self)[name]

    @property
    def like(self) -> Float[Tensor, "0 D"]:
        return self._like

    def remembering(self, columns: Mapping[str, Float[Tensor, " T"]]) -> LazyEntries:
        entries = object.__new__(LazyEntries)
        vars(entries).update(vars(self), columns={**self.columns, **columns})
        return entries
