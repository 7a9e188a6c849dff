"""Tables of all sequences of a decode step that goes through all layers in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from larder.cache.sequence import SequenceCache
from larder.models.observers import Observer, StepObserver
from larder.ops.cpu.decode_attention import EvictionRows

if TYPE_CHECKING:  # few policies evict by a kernel
    from larder.cache.step_layout import SequenceEviction
    from larder.cache.step_tables import StepTables


class StepLayouts:
    """Tables of the sequences of one decode step, and the evictions that kernels carry out.

    A step goes `take_rows`, `plan_evictions`, `finish` and `end_step`. Where all evictions are
    known before it, the call that runs the layers evicts behind the attention of each, while the
    entries are in a cache of the processor; else one call evicts from all layers behind it.

    Args:
        caches: of each sequence.
        tables: of each.
    """

    def __init__(self, caches: Sequence[SequenceCache], tables: Sequence[StepTables]) -> None:
        self._caches, self._tables = caches, tables
        # Evictions of the call that runs the layers, by sequence.
        self._evictions: dict[int, SequenceEviction] = {}

    @staticmethod
    def of(caches: Sequence[SequenceCache], dtype: torch.dtype) -> StepLayouts | None:
        """Tables of caches over keys and values of that type; None if there is one without."""
        found: dict[int, StepTables] = {}
        # Caches that may have none come first: beside one, no others are made in vain.
        for number in sorted(range(len(caches)), key=lambda n: caches[n].always_has_tables):
            layout = caches[number].step_layout(dtype)
            if layout is None:
                return None
            found[number] = layout
        return StepLayouts(caches, [found[number] for number in range(len(caches))])

    def take_rows(self) -> NDArray[np.int64]:
        """Fields of `struct step_row` by layer and sequence."""
        return np.stack([own.take_rows() for own in self._tables], 1)

    def plan_evictions(self, observer: Observer | None) -> EvictionRows | None:
        """Evictions for the call that runs the layers; None to evict behind it.

        They are counted in their caches: a call that fails is followed by `undo_evictions`.
        """
        if not isinstance(observer, StepObserver):
            return None
        known = observer.kept_evictions(self._tables)
        if known is None or len(known) < len(self._tables):
            return None
        from larder.cache.step_layout import layer_evictions, prepare_evictions

        rows = layer_evictions(tuple(known.values()))
        if rows is not None:
            prepare_evictions(tuple(known.values()))
            self._evictions = known
        return rows

    def finish(self, observer: Observer | None) -> bool:
        """Count the tokens, and evict where that is due; True if the observer is done with them.

        Raises:
            MemoryError: buffers of an eviction could not be allocated.
        """
        for layout in self._tables:
            layout.count_evicted_step() if self._evictions else layout.count_step()
        is_done = isinstance(observer, StepObserver) and self._evict(observer)
        for layout in self._tables:
            layout.settle()
        return is_done

    def _evict(self, observer: StepObserver) -> bool:
        """Evict from all sequences; True if the observer is done with them."""
        due = self._evictions or observer.step_evictions(self._tables)
        if not due:
            return observer.end_step({})
        from larder.cache.step_layout import count_evictions, evict_sequences  # few evict so

        evict = count_evictions if self._evictions else evict_sequences
        done = evict(tuple(due.values()))
        return observer.end_step(dict(zip(due, done, strict=True)))

    def undo_evictions(self, plans: Sequence[int]) -> None:
        """Undo the evictions of a step that failed, where nothing else was changed for good.

        Args:
            plans: changes of each cache before the step that cannot be undone.
        """
        for cache, layout, before in zip(self._caches, self._tables, plans, strict=True):
            if cache.plans == before + 1 and layout.undo_eviction():
                cache.discount_eviction()

    def end_step(self) -> None:
        """Free what would undo evictions."""
        for layout in self._tables:
            layout.end_step()
