"""Decode steps over pages: the segments of a forward batch that append one token to an arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor

from larder.cache.block_tables import own_pages
from larder.core.types import Keys, Queries, Values
from larder.models.attention_backend import SteppedSegments
from larder.models.observers import Observer, StepObserver
from larder.ops.packing import device_tensor

if TYPE_CHECKING:
    from larder.cache.block_tables import BlockTables, StepAttention
    from larder.cache.page_arena import PageArena
    from larder.cache.page_evictions import PageEviction
    from larder.cache.sequence import SequenceCache


class PagedSteps:
    """Segments of a batch with one new token each, whose caches are in pages of one arena.

    It is the arena of the first segment; segments in pages of another one are attended to apart.

    Args:
        batch: cache of each segment of the batch.
        steps: indices of those that append one token.
        firsts: index of the first token of each segment in the batch.
    """

    def __init__(
        self, batch: Sequence[SequenceCache], steps: Sequence[int], firsts: Sequence[int]
    ) -> None:
        self._arena = cast("PageArena | None", batch[0].spec.arena)
        self._indices: list[int] = []
        if self._arena is not None:
            caches = ((index, batch[index]) for index in steps)
            held = {
                i: cache.page_leases() for i, cache in caches if cache.spec.arena is self._arena
            }
            self._indices = [index for index, leases in held.items() if leases]
            self._leases = [held[index] for index in self._indices]
        self._caches = [batch[index] for index in self._indices]
        self._columns = [firsts[index] for index in self._indices]
        self._tables: BlockTables | None = None
        self._positions: list[int] = []
        # What kernels evict behind the step, by index in `_caches`, and what layers attended to.
        self._evictions: dict[int, PageEviction] = {}
        self._seen: dict[int, StepAttention] = {}
        self._selected: Tensor | None = None

    @property
    def segment_count(self) -> int:
        """Number of the segments."""
        return len(self._indices)

    def prepare(self, indices: Sequence[Sequence[int]], observer: Observer | None) -> None:
        """Reserve pages for the new entries, and set the tables of the step.

        Args:
            indices: true positions of the tokens of each segment of the batch.
            observer: of the batch, which may leave evictions to kernels.

        Raises:
            CacheError: the arena has no pages left.
        """
        if self._arena is None or not self._indices:
            return
        self._positions = [indices[index][0] for index in self._indices]
        if isinstance(observer, StepObserver):
            due = observer.page_evictions(self._indices)
            self._evictions = {self._indices.index(n): own for n, own in due.items()}
        if self._evictions:
            own_pages([self._leases[number] for number in self._evictions])
        self._tables = self._arena.prepare_step(self._leases, self._positions)
        if self._evictions:
            from larder.cache.page_evictions import set_evictions  # few policies evict so

            set_evictions(self._tables, self._evictions)

    def attend(
        self, layer: int, queries: Queries, keys: Keys, values: Values
    ) -> SteppedSegments | None:
        """Attention of the segments, in one call; None without pages."""
        if self._tables is None or layer not in self._tables.layers:
            return None
        if len(self._columns) < queries.shape[1]:
            if self._selected is None:
                self._selected = device_tensor(self._columns, queries.device)
            queries, keys, values = (
                side.index_select(1, self._selected) for side in (queries, keys, values)
            )
        out, attention = self._tables.layers[layer].attend(queries, keys, values)
        if self._evictions:
            self._seen[layer] = attention
        for cache, position in zip(self._caches, self._positions, strict=True):
            cache.step_layer(layer).count_step(position)
        return SteppedSegments(self._indices, out)

    def evict(self) -> None:
        """Evict behind the step what the observer left to kernels."""
        if self._tables is None or not self._evictions:
            return
        from larder.cache.page_evictions import evict_step

        evict_step(self._tables, self._seen, self._caches, self._evictions)
