"""Decode steps as captured graphs: one launch for a step of the whole model, at fixed shapes.

A graph repeats kernels with the arguments of its capture, so everything that changes between steps
is in static buffers: token ids, positions and the tables of the step. What the host decides (pages,
lengths) it decides before a replay. Batches are padded to a few sizes, each captured once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.block_tables import BlockTables, StepAttention, own_pages, reserve_step
from larder.cache.page_arena import PageArena
from larder.cache.page_evictions import (
    EvictionTables,
    PageEviction,
    common_merging,
    count_evictions,
    count_plans,
    set_evictions,
)
from larder.cache.page_lease import PageLease, has_biases
from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError, LarderError, ModelError
from larder.core.spec import ModelSpec
from larder.core.types import Keys, Queries, Values
from larder.models.attention_backend import CONTEXT_KEYWORD, NO_MASK, AttentionInputs
from larder.models.observers import LayerActivations, Observer, StepObserver
from larder.ops.packing import write_to_device

if TYPE_CHECKING:
    from larder.models.decoder import Decoder

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
WARM_UPS = 2  # runs before a capture, in which libraries allocate what they need


@runtime_checkable
class GraphCapture(Protocol):
    """Capture of calls that are repeated at the same addresses."""

    def capture(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run a call once or more, and return what repeats it into the same output tensor.

        The call reads tensors that stay where they are, and may be run several times in place of
        once.
        """
        ...


class CudaGraphCapture:
    """Capture by CUDA graphs, which share their memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = call()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class ObservedStep:
    """Queries, keys and values of all layers in one buffer at a fixed address.

    Args:
        spec: of the model.
        batch_len: sequences of a step.
    """

    def __init__(self, spec: ModelSpec, batch_len: int) -> None:
        self._layers, self._batch_len = spec.layers, batch_len
        numbers = sum(
            (layer.query_heads + 2 * layer.kv_heads) * layer.head_dim for layer in spec.layers
        )
        self._buffer = torch.zeros(batch_len * numbers, dtype=spec.dtype, device=spec.device)
        self._sides = self._views(self._buffer)

    def write(self, layer: int, queries: Queries, keys: Keys, values: Values) -> None:
        """Write queries, keys and values of one layer."""
        for target, source in zip(self._sides[layer], (queries, keys, values), strict=True):
            target.copy_(source)

    def copies(self) -> list[list[Tensor]]:
        """Queries, keys and values of every layer, in memory that later steps do not change."""
        return self._views(self._buffer.clone())

    def _views(self, buffer: Float[Tensor, " _"]) -> list[list[Tensor]]:
        heads = [(layer.query_heads, layer.kv_heads, layer.kv_heads) for layer in self._layers]
        sizes = [
            count * self._batch_len * layer.head_dim
            for layer, counts in zip(self._layers, heads, strict=True)
            for count in counts
        ]
        parts = iter(buffer.split(sizes))
        return [
            [next(parts).view(count, self._batch_len, layer.head_dim) for count in counts]
            for layer, counts in zip(self._layers, heads, strict=True)
        ]


class GraphContractError(LarderError):
    """Call that a graph would not repeat as it runs without one."""


@dataclass
class _Bucket:
    """Static buffers of one batch size, and its graph once it is captured.

    Args:
        is_evicting: whether the graph ends with evictions, by the tables of the step.
        seen: queries, keys and values of each layer in a step that is observed.
        attended: what the layers attended to, in a step that evicts.
    """

    tables: BlockTables
    ids: Int64[Tensor, "1 B"]
    positions: Int64[Tensor, "1 B"]
    is_evicting: bool
    seen: ObservedStep | None = None
    attended: dict[int, StepAttention] = field(default_factory=dict[int, StepAttention])
    replay: Callable[[], Tensor] | None = None


class _StepAttention:
    """Attention of every layer of a step, by its tables."""

    def __init__(self, decoder: Decoder, bucket: _Bucket) -> None:
        self._spec, self._bucket = decoder.spec, bucket

    def attend(self, inputs: AttentionInputs) -> Queries:
        layer, bucket = self._spec.index_of(inputs.layer), self._bucket
        queries = inputs.queries_at(bucket.positions[0])
        if bucket.seen is not None:
            bucket.seen.write(layer, queries, inputs.keys, inputs.values)
        out, attention = bucket.tables.layers[layer].attend(queries, inputs.keys, inputs.values)
        if bucket.is_evicting:
            bucket.attended[layer] = attention
        return out


class DecodeGraphs:
    """Decode steps of caches in pages, captured once per batch size.

    Policies evict between steps, by plans, or at the end of a graph where they leave it to kernels
    (`StepObserver.page_evictions`). A step that fails has changed no cache, but one whose graph or
    observer fails is rolled back as a forward batch is: caches that kernels evict from are invalid.

    Args:
        decoder: decoder after `use_pages`.
        capture: capture of the device.
        width: most pages of a kv head; a step reads tables of this width. None captures a step
            again for each power of two.
        batch_sizes: numbers of sequences to capture, ascending.

    Raises:
        CacheError: the decoder has no arena, or one whose attention reads tables on the host.
        ModelError: a layer of the model has no pages, as one with a sliding window.
    """

    def __init__(
        self,
        decoder: Decoder,
        capture: GraphCapture,
        width: int | None = None,
        batch_sizes: Sequence[int] = BATCH_SIZES,
    ) -> None:
        arena, spec = decoder.spec.arena, decoder.spec
        if not isinstance(arena, PageArena):
            raise CacheError("The decoder has no arena of pages: call its use_pages() first.")
        missing = [layer.index for layer in spec.layers if layer.index not in arena.pages]
        if missing or spec.recurrent:
            raise ModelError(
                f"Layers {missing} of the model, or layers without attention, hold something else "
                "than pages, so its steps cannot be captured: call Decoder.forward_logits()."
            )
        fixed = [store.backend for store in arena.pages.values() if not store.backend.is_capturable]
        if fixed:
            raise CacheError(
                f"Attention by the backend {fixed[0].value} reads lengths on the host, so a graph "
                "would repeat those of its capture: give PageArena the backend gathered."
            )
        self._decoder, self._arena, self._capture = decoder, arena, capture
        self._width, self._sizes = width, tuple(batch_sizes)
        self._buckets: dict[tuple[object, ...], _Bucket] = {}
        self._num_moves = arena.num_moves  # when the graphs were captured

    @torch.no_grad()
    def step(
        self, caches: Sequence[SequenceCache], ids: Sequence[int], observer: Observer | None = None
    ) -> Float[Tensor, "B V"]:
        """Append a token to each cache, and return its float32 logits, valid until the next step.

        Args:
            observer: called for each layer of each cache once the step is done.

        Raises:
            CacheError: no pages are left, a head has more than `width`, there are more caches than
                the largest batch size, or a cache is not in pages of the decoder's arena.
            GraphContractError: the step cannot be captured; nothing has changed.
        """
        leases = [self._leases(cache) for cache in caches]
        evictions: dict[int, PageEviction] = {}
        if isinstance(observer, StepObserver):
            evictions = observer.page_evictions(range(len(caches)))
        own_pages([leases[number] for number in evictions])
        reserve_step(leases)
        is_observed = observer is not None and len(evictions) < len(caches)
        bucket = self._bucket(len(caches), leases, is_observed, evictions)
        positions = [cache.next_position for cache in caches]
        bucket.tables.update(leases, positions)
        for buffer, numbers in ((bucket.ids, ids), (bucket.positions, positions)):
            padded = np.zeros(buffer.shape, np.int64)
            padded[0, : len(numbers)] = numbers
            write_to_device(buffer, padded)
        if bucket.replay is None:
            bucket.replay = self._captured(bucket)
        if evictions:
            set_evictions(bucket.tables, evictions)
        plans = [cache.plans for cache in caches]
        logits = self._replay(bucket, caches, evictions)
        for cache, position in zip(caches, positions, strict=True):
            cache.count_step(position)
        count_evictions(caches, evictions)
        if observer is not None and bucket.seen is not None:
            self._observe(caches, plans, observer, bucket.seen, bucket.positions[0].clone())
        for cache in caches:
            cache.advance(1)
        return logits[: len(caches)]

    def _captured(self, bucket: _Bucket) -> Callable[[], Tensor]:
        """Replay of a step in a bucket.

        Raises:
            GraphContractError: the device cannot capture it.
        """
        try:
            return self._capture.capture(lambda: self._forward(bucket))
        except RuntimeError as error:
            raise GraphContractError(f"A step of the model cannot be captured: {error}") from error

    def _replay(
        self,
        bucket: _Bucket,
        caches: Sequence[SequenceCache],
        evictions: Mapping[int, PageEviction],
    ) -> Float[Tensor, "B V"]:
        """Logits of a step that is captured; caches that it evicts from are invalid if it fails."""
        assert bucket.replay is not None
        count_plans(caches, evictions)
        try:
            return bucket.replay()
        except BaseException:  # any of the layers may have lost entries
            for sequence in evictions:
                caches[sequence].invalidate()
            raise

    def _observe(
        self,
        caches: Sequence[SequenceCache],
        plans: Sequence[int],
        observer: Observer,
        seen: ObservedStep,
        positions: Int64[Tensor, " B"],
    ) -> None:
        """Report all layers of a step; caches return to where they were if that fails.

        Args:
            plans: of each cache before the step; those with more since are invalid then.
        """
        try:
            for layer, sides in enumerate(seen.copies()):
                for row in range(len(caches)):
                    index = slice(row, row + 1)
                    queries, keys, values = (side[:, index] for side in sides)
                    activations = LayerActivations(queries, keys, values, positions[index])
                    observer(row, layer, activations)
        except BaseException:
            for cache, before in zip(caches, plans, strict=True):
                if cache.plans != before:
                    cache.invalidate()
                else:
                    cache.truncate(cache.next_position)
            raise

    def _leases(self, cache: SequenceCache) -> list[PageLease]:
        """Pages of all layers of a cache."""
        leases = cache.page_leases()
        if cache.spec.arena is not self._arena or len(leases) != len(self._arena.pages):
            raise CacheError(
                "A cache has entries outside the pages of the arena that graphs were captured for: "
                "make it after Decoder.use_pages(), without codecs, or make other "
                "DecodeGraphs after another use_pages()."
            )
        return leases

    def _bucket(
        self,
        count: int,
        leases: Sequence[Sequence[PageLease]],
        is_observed: bool,
        evictions: Mapping[int, PageEviction],
    ) -> _Bucket:
        """Buffers of the smallest batch size that holds `count` sequences."""
        fitting = [size for size in self._sizes if size >= count]
        if not fitting:
            raise CacheError(
                f"{count} caches are more than the largest batch size, {self._sizes[-1]}: give "
                "DecodeGraphs larger batch_sizes."
            )
        arena, size, width = self._arena, fitting[0], self._table_width(leases)
        if self._num_moves != arena.num_moves:  # the arena has grown into other memory
            self._buckets.clear()
            self._num_moves = arena.num_moves
        merging, is_evicting = common_merging(evictions), bool(evictions)
        if merging is not None:  # a sequence's own rate is in the tables
            merging = replace(merging, rate=1.0)
        key = size, width, is_observed, has_biases(leases), is_evicting, merging
        if key not in self._buckets:
            tables = arena.new_tables(size, width, has_biases(leases))
            if is_evicting:
                tables.evictions = EvictionTables(tables, merging)
            device, spec = arena.positions.device, self._decoder.spec
            ids, positions = torch.zeros(2, 1, size, dtype=torch.int64, device=device)
            seen = ObservedStep(spec, size) if is_observed else None
            self._buckets[key] = _Bucket(tables, ids, positions, is_evicting, seen)
        return self._buckets[key]

    def _table_width(self, leases: Sequence[Sequence[PageLease]]) -> int:
        """Pages of a kv head that the tables of a step are as wide as."""
        widest = max(lease.table.shape[1] for own in leases for lease in own)
        if self._width is None:
            return 1 << (widest - 1).bit_length()
        if widest > self._width:
            raise CacheError(
                f"A kv head has {widest} pages, but graphs were captured for {self._width}: make "
                "DecodeGraphs with a larger width."
            )
        return self._width

    def _forward(self, bucket: _Bucket) -> Float[Tensor, "B V"]:
        decoder = self._decoder
        context = {CONTEXT_KEYWORD: _StepAttention(decoder, bucket)}
        with decoder.attention, decoder.layer_runner.layers(bucket.ids.shape[1]):
            out = decoder.module(
                input_ids=bucket.ids,
                position_ids=bucket.positions,
                attention_mask=NO_MASK,
                use_cache=False,
                **context,
            )
            if bucket.tables.evictions is not None:
                bucket.tables.evictions.evict(bucket.attended)
                bucket.attended.clear()
        return out.logits[0].float()
