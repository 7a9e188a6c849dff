"""Hooks that recompute keys and values of rejected entries during a forward batch.

They record the inputs of layers for later recomputation, and extend segments by the tokens that
must be re-read. See `larder.models.recompute` for the two methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from larder.cache.forms.corrected import CorrectedLayer
from larder.cache.forms.rebuilt import RecomputedKV, RecomputedLayer, recomputed_layers
from larder.core.errors import CacheError
from larder.core.spec import RecomputeSource
from larder.core.types import AppendKind, Mode, Positions
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import CONTEXT_KEYWORD
from larder.models.batch_segment import BatchSegment

if TYPE_CHECKING:
    from larder.models.kv_cost import ModelShape
    from larder.models.recompute import KVRecompute


def with_reread_tokens(segment: BatchSegment, mode: Mode) -> BatchSegment:
    """Segment extended by the tokens of its cache that must be re-read."""
    stores, spec = recomputed_layers(segment.cache.layers), segment.cache.cache_spec.rebuilding
    if mode is Mode.PROBE or spec is None or not spec.rereads:
        return segment
    count = max(store.reread_tokens for store in stores)
    if not count:
        return segment
    source = _source_layer(segment).source
    if len(source) < count:
        raise CacheError(
            f"{count} tokens must be re-read, but the source of only {len(source)} is recorded: "
            "read the text through a decoder."
        )
    if spec.source is RecomputeSource.ONE:
        # The ids do not matter: what layers before the residual compute is replaced.
        return replace(segment, reread_ids=(0,) * count)
    return replace(segment, reread_ids=tuple(source[:count, 0].tolist()))


def with_corrected_tokens(segment: BatchSegment, mode: Mode) -> BatchSegment:
    """Segment extended by the tokens of the cache that it corrects; unchanged if there are none."""
    stores = _corrected_stores(segment)
    if (
        not stores
        or mode is not Mode.APPEND
        or len(segment.ids) > 1
        or segment.append_kind is not AppendKind.STEP
    ):
        return segment
    ids = stores[0].ids
    return replace(segment, reread_ids=ids, reread_start=segment.cache.next_position - len(ids))


def advance_corrected(segments: Sequence[BatchSegment]) -> None:
    """Record the appended tokens in corrected layers, after a forward in append mode."""
    for segment in segments:
        for store in _corrected_stores(segment):
            store.record_ids(segment.ids)


def _corrected_stores(segment: BatchSegment) -> list[CorrectedLayer]:
    return [store for store in segment.cache.layers if isinstance(store, CorrectedLayer)]


class RecomputeHooks:
    """Recomputation during one forward batch.

    Args:
        recompute: called on first use.
        shape: sizes of the model, for costs.
        batch: the batch in the model's call.
    """

    def __init__(
        self,
        recompute: Callable[[], KVRecompute],
        shape: Callable[[], ModelShape],
        segments: Sequence[BatchSegment],
        mode: Mode,
        batch: object,
    ) -> None:
        self._recompute, self._shape = recompute, shape
        self._segments, self._mode, self._batch = segments, mode, batch
        self._taken: dict[int, Tensor] = {}  # inputs by layer, new tokens of all segments

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager with the hooks on; a block that fails stores no sources."""
        stores = [
            store for segment in self._segments for store in recomputed_layers(segment.cache.layers)
        ]
        if not stores:
            yield
            return
        before = [store.tokens for store in stores]
        for store in stores:
            store.project = self._project
        try:
            with forward_hooks(self._hooks()):
                yield
        finally:
            for store in stores:
                store.project = None
        if self._mode is Mode.APPEND:
            self._store_sources()
        for store, tokens in zip(stores, before, strict=True):
            store.operations += (store.tokens - tokens) * self._operations_per_token(store)

    def _project(
        self, layer: int, residuals: Tensor, positions: Positions
    ) -> tuple[RecomputedKV, RecomputedKV]:
        return self._recompute().project({layer: residuals}, positions)[layer]

    def _operations_per_token(self, store: RecomputedLayer) -> int:
        """Operations per token that this layer recomputed in the batch."""
        shape, spec = self._shape(), store.rebuilding
        if not spec.rereads:
            return shape.projections
        if store.layer.index < spec.depth:  # it computed the re-read tokens to no effect
            return shape.projections + shape.mlp
        count = max(len(segment.reread_ids) for segment in self._segments)
        from larder.models.kv_cost import KVSource

        return shape.operations_per_token(KVSource.IDS, count) // shape.layers

    def _hooks(self) -> list[RemovableHandle]:
        """Hooks on the layers whose input is recorded."""
        layers = {layer for segment in self._segments for layer in _residual_layers(segment)}
        if not layers:
            return []
        modules = self._recompute().layers
        return [
            modules[index].register_forward_pre_hook(self._visitor(index), with_kwargs=True)
            for index in sorted(layers)
        ]

    def _visitor(self, index: int) -> Callable[[nn.Module, Any, dict[str, Any]], Any]:
        def visit(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if named.get(CONTEXT_KEYWORD) is not self._batch:
                return None
            entering = args[0] if args else named["hidden_states"]
            self._taken[index] = torch.cat([own[n:] for own, n in self._split(entering[0])]).clone()
            if not any(segment.reread_ids for segment in self._segments):
                return None
            states = self._restored(index, entering)
            if args:
                return (states, *args[1:]), named
            return args, {**named, "hidden_states": states}

        return visit

    def _split(self, packed: Tensor) -> list[tuple[Tensor, int]]:
        """Part of each segment, and the count of its leading re-read tokens."""
        parts = packed.split([segment.num_tokens for segment in self._segments])
        return [
            (part, len(segment.reread_ids))
            for part, segment in zip(parts, self._segments, strict=True)
        ]

    def _restored(self, index: int, entering: Tensor) -> Tensor:
        """Input of a layer, re-read tokens replaced by their recorded residuals."""
        parts: list[Tensor] = []
        for segment, (states, count) in zip(self._segments, self._split(entering[0]), strict=True):
            if not count or index not in _residual_layers(segment):
                parts.append(states)
                continue
            store = segment.cache.layers[index]
            assert isinstance(store, RecomputedLayer)
            parts += [store.source[:count].to(states), states[count:]]
        return torch.cat(parts)[None]

    def _store_sources(self) -> None:
        """Append the residuals or ids of the new tokens to the caches."""
        starts = (
            torch.tensor([0, *(len(segment.ids) for segment in self._segments)]).cumsum(0).tolist()
        )
        for segment, start in zip(self._segments, starts, strict=False):
            stop = start + len(segment.ids)
            for layer in _residual_layers(segment):
                store = segment.cache.layers[layer]
                assert isinstance(store, RecomputedLayer)
                store.append_source(self._taken[layer][start:stop].clone())
            if segment.cache.cache_spec.rebuilding is not None and not _residual_layers(segment):
                ids = torch.tensor(segment.ids, dtype=torch.int32, device=segment.cache.spec.device)
                _source_layer(segment).append_source(ids[:, None])


def _residual_layers(segment: BatchSegment) -> list[int]:
    """Layers before which a cache records residuals; none if it records ids."""
    rebuilding = segment.cache.cache_spec.rebuilding
    if rebuilding is None or rebuilding.source is RecomputeSource.IDS:
        return []
    if rebuilding.source is RecomputeSource.ONE:
        return [_source_layer(segment).layer.index]
    return [store.layer.index for store in recomputed_layers(segment.cache.layers)]


def _source_layer(segment: BatchSegment) -> RecomputedLayer:
    """Layer whose source serves all layers."""
    spec = segment.cache.cache_spec.rebuilding
    assert spec is not None
    found = [s for s in recomputed_layers(segment.cache.layers) if s.layer.index >= spec.depth]
    if not found:
        raise CacheError(
            f"No layer from {spec.depth} on can be recomputed: give recompute() a lower depth."
        )
    return found[0]
