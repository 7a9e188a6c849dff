"""Tables of the storage of one sequence for decode steps, kept between steps; those of dense forms.

While a cache changes by decode steps alone, a step makes no call per layer before the kernels:
addresses stay, and lengths are counted in place. All heads of a dense layer hold the same
positions, and those of later steps are known: they are written once, into the slack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from larder.ops.cpu.decode_attention import STEP_ROW, StepTable

if TYPE_CHECKING:  # the form imports this module; few policies evict by a kernel
    from larder.cache.forms.dense import DenseLayer
    from larder.ops.cpu.decode_eviction import EvictionTable


class StepTables(ABC):
    """Contract of the tables of one sequence: a step goes `take_rows`, `count_step`, `settle`."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Type of keys and values."""

    @property
    @abstractmethod
    def is_current(self) -> bool:
        """True while every layer has the storage of the tables, and room for one more entry."""

    @abstractmethod
    def take_rows(self) -> NDArray[np.int64]:
        """Fields of `struct step_row` by layer."""

    @property
    def block_room(self) -> int:
        """Tokens of a block that kernels can write behind the entries of every layer; 0 in forms
        that take steps alone."""
        return 0

    @property
    def storages(self) -> list[tuple[object, ...]]:
        """What kernels read and write of each layer now, first the storage of new entries."""
        raise NotImplementedError  # forms with a `block_room` have it

    def count_block(self, count: int) -> None:
        """Count the entries of a block that kernels have written, in every layer."""
        raise NotImplementedError  # forms with a `block_room` have it

    @abstractmethod
    def count_step(self) -> None:
        """Count the entry that was written behind each head of every layer."""

    def eviction_table(
        self, owner: object, key: tuple[object, ...], build: Callable[[], EvictionTable | None]
    ) -> EvictionTable | None:
        """Table of the layers that a rule evicts from; None in forms that evict by plans."""
        del owner, key, build
        return None

    def kept_eviction_table(self, owner: object, key: tuple[object, ...]) -> EvictionTable | None:
        """`eviction_table` of an earlier step; None if there is none, or it is another's."""
        del owner, key
        return None

    def prepare_eviction(self, table: EvictionTable, length: int) -> None:
        """Set what changes at every step in an `eviction_table`, which can then be undone.

        Args:
            length: true tokens read, with that of the step.
        """
        raise NotImplementedError  # forms with such a table have it

    def count_evicted_step(self) -> None:
        """`count_step` where the kernel has counted the entries, and evicted from them."""
        raise NotImplementedError  # forms with such a table have it

    def count_eviction(self, table: EvictionTable, rooms: Sequence[int | None]) -> list[int]:
        """Count an eviction from the layers of a table, and return those that are done.

        Args:
            rooms: slack behind the fullest head of each layer; None where nothing changed.
        """
        raise NotImplementedError  # forms with such a table have it

    @abstractmethod
    def settle(self) -> None:
        """Count in every layer what kernels have appended and evicted."""

    def undo_eviction(self) -> bool:
        """Undo the eviction of a step that has not ended; False if there is none to undo.

        The token that was appended stays: cutting the layers removes it.
        """
        return False

    @abstractmethod
    def end_step(self) -> None:
        """Free what would undo an eviction."""


class DenseStepTables(StepTables):
    """Tables of the dense layers of one sequence, valid while steps alone change its layers.

    Storage in front of the sequence's own, which others hold as well, is in the tables, too.

    Args:
        layers: all layers of the sequence, which `can_lay_out`.
        position: true position of the next token; those behind it follow one by one.
    """

    def __init__(self, layers: Sequence[DenseLayer], position: int) -> None:
        self._layers = tuple(layers)
        storages = [layer.start_steps(position) for layer in layers]
        self._marks = [layer.storage_mark for layer in layers]
        self._room = min(layer.room for layer in layers)
        # Arrays of which the table has the addresses.
        self._starts = np.stack([own.starts.numpy() for own in storages])
        self._lengths = np.stack([own.lengths.numpy() for own in storages])
        arrays = zip(storages, self._starts, self._lengths, strict=True)
        rows = [
            own._replace(starts=torch.from_numpy(starts), lengths=torch.from_numpy(lengths))
            for own, starts, lengths in arrays
        ]
        nothing = torch.empty(0, 0, 0)  # the new keys and values of a step
        self._table = StepTable.of([(nothing, nothing, (own,)) for own in rows], (position,))
        self._table.rows[:, STEP_ROW.index("stored_rows")] = self._table.stored_rows
        self._dtype = storages[0].keys.dtype
        self._moved = [layer for layer in layers if layer.replaced_bytes]
        self._num_steps = 0

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def is_current(self) -> bool:
        present = [layer.storage_mark for layer in self._layers]
        return self._room > 0 and all(map(is_, self._marks, present))

    def take_rows(self) -> NDArray[np.int64]:
        if self._num_steps == 1:  # the first step had moved what there was
            for layer in self._moved:
                layer.replaced_bytes = 0
        return self._table.rows

    @property
    def block_room(self) -> int:
        return self._room

    @property
    def storages(self) -> list[tuple[object, ...]]:
        return [layer.storages for layer in self._layers]

    def count_block(self, count: int) -> None:
        self._lengths += count
        self._room -= count
        self._num_steps += 1
        self._layers[0].count_steps(self._layers, count)

    def count_step(self) -> None:
        self._lengths += 1
        self._room -= 1
        self._num_steps += 1

    def settle(self) -> None:
        self._layers[0].count_steps(self._layers, 1)

    def end_step(self) -> None:
        """Free nothing: dense forms evict by plans."""
