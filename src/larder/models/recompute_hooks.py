"""Giving caches back, during a pass, what they hold as something else.

Takes what enters the layers for what will be rebuilt later, and says which text has to be read
again with this pass. See `larder.models.recompute` for the two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from larder.cache.forms.rebuilt import RecomputedKV, RecomputedLayer, recomputed_layers
from larder.core.errors import CacheError
from larder.core.spec import RecomputeSource
from larder.core.types import Mode, Positions
from larder.models.forward_batch import BatchSegment
from larder.models.kv_cost import KVSource, ModelShape

CONTEXT_KEYWORD = "larder"  # by which a pass comes down the model's call


@runtime_checkable
class KVProjector(Protocol):
    """What knows the layers of a model, and has them project residuals."""

    @property
    def layers(self) -> list[nn.Module]:
        """The model's, in order."""
        ...

    def project(
        self, residuals: Mapping[int, Tensor], positions: Positions
    ) -> dict[int, tuple[RecomputedKV, RecomputedKV]]:
        """Keys and values of some layers, each from its own residuals of the same tokens."""
        ...


def with_reread_tokens(row: BatchSegment, mode: Mode) -> BatchSegment:
    """The row, with the text before it that has to be read once more."""
    stores, makeup = recomputed_layers(row.cache.stores), row.cache.cache_spec
    if mode is Mode.PROBE or makeup.rebuilding is None or not makeup.rebuilding.rereads:
        return row
    count = max(store.wanted for store in stores)
    if not count:
        return row
    source = _source_layer(row).source
    if len(source) < count:
        raise CacheError(
            f"{count} tokens have to be read again, but of {len(source)} it is known what they "
            "were: read the text through a decoder."
        )
    if makeup.rebuilding.source is RecomputeSource.ONE:
        return replace(row, again=(0,) * count)  # layers before the residual answer to nobody
    return replace(row, again=tuple(source[:count, 0].tolist()))


class RecomputeHooks:
    """Rebuilds for one pass, while its `with` block lasts.

    Args:
        recompute: made when first asked for.
        journey: the pass itself, as it comes down the model's call.
    """

    def __init__(
        self,
        recompute: Callable[[], KVProjector],
        shape: Callable[[], ModelShape],
        rows: Sequence[BatchSegment],
        mode: Mode,
        journey: object,
    ) -> None:
        self._recompute, self._shape = recompute, shape
        self._rows, self._mode, self._journey = rows, mode, journey
        self._taken: dict[int, Tensor] = {}  # what entered a layer, new tokens of all rows

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """What is read is known afterwards; a block that fails leaves nothing."""
        stores = [store for row in self._rows for store in recomputed_layers(row.cache.stores)]
        if not stores:
            yield
            return
        before = [store.tokens for store in stores]
        handles = self._hooks()
        for store in stores:
            store.project = self._project
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for store in stores:
                store.project = None
        if self._mode is Mode.APPEND:
            self._keep()
        for store, tokens in zip(stores, before, strict=True):
            store.operations += (store.tokens - tokens) * self._operations_per_token(store)

    def _project(
        self, layer: int, residuals: Tensor, positions: Positions
    ) -> tuple[RecomputedKV, RecomputedKV]:
        return self._recompute().project({layer: residuals}, positions)[layer]

    def _operations_per_token(self, store: RecomputedLayer) -> int:
        """Operations that each token takes which this layer had rebuilt in the pass."""
        shape, manner = self._shape(), store.rebuilding
        if not manner.rereads:
            return shape.projections
        if store.layer.index < manner.depth:  # it was given the text, and made nothing of it
            return shape.projections + shape.rest
        count = max(len(row.again) for row in self._rows)
        return shape.operations_per_token(KVSource.IDS, count) // shape.layers

    def _hooks(self) -> list[Any]:
        """On the layers whose input is held, or was."""
        layers = {layer for row in self._rows for layer in _residual_layers(row)}
        if not layers:
            return []
        modules = self._recompute().layers
        return [
            modules[index].register_forward_pre_hook(self._visitor(index), with_kwargs=True)
            for index in sorted(layers)
        ]

    def _visitor(self, index: int) -> Callable[[nn.Module, Any, dict[str, Any]], Any]:
        def visit(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            del module
            if named.get(CONTEXT_KEYWORD) is not self._journey:
                return None
            entering = args[0] if args else named["hidden_states"]
            self._taken[index] = torch.cat([own[n:] for own, n in self._split(entering[0])]).clone()
            if not any(row.again for row in self._rows):
                return None
            told = self._restored(index, entering)
            return ((told, *args[1:]), named) if args else (args, {**named, "hidden_states": told})

        return visit

    def _split(self, packed: Tensor) -> list[tuple[Tensor, int]]:
        """The part of each row, and how many of its first tokens are read again."""
        parts = packed.split([row.width for row in self._rows])
        return [(own, len(row.again)) for own, row in zip(parts, self._rows, strict=True)]

    def _restored(self, index: int, entering: Tensor) -> Tensor:
        """What enters a layer, with what is held of it in the place of what came from below."""
        parts: list[Tensor] = []
        for row, (own, count) in zip(self._rows, self._split(entering[0]), strict=True):
            store = row.cache.stores[index]
            assert isinstance(store, RecomputedLayer)  # it was asked for what stands there
            parts += [store.source[:count].to(own), own[count:]] if count else [own]
        return torch.cat(parts)[None]

    def _keep(self) -> None:
        """Every cache takes in what stands for the tokens that it has read."""
        starts = torch.tensor([0, *(len(row.ids) for row in self._rows)]).cumsum(0).tolist()
        for row, start in zip(self._rows, starts, strict=False):
            stop = start + len(row.ids)
            for layer in _residual_layers(row):
                store = row.cache.stores[layer]
                assert isinstance(store, RecomputedLayer)
                store.keep(self._taken[layer][start:stop].clone())
            if row.cache.cache_spec.rebuilding is not None and not _residual_layers(row):
                ids = torch.tensor(row.ids, dtype=torch.int32, device=row.cache.spec.device)
                _source_layer(row).keep(ids[:, None])


def _residual_layers(row: BatchSegment) -> list[int]:
    """The layers before which a cache holds residuals; none of one that holds ids."""
    rebuilding = row.cache.cache_spec.rebuilding
    if rebuilding is None or rebuilding.source is RecomputeSource.IDS:
        return []
    if rebuilding.source is RecomputeSource.ONE:
        return [_source_layer(row).layer.index]
    return [store.layer.index for store in recomputed_layers(row.cache.stores)]


def _source_layer(row: BatchSegment) -> RecomputedLayer:
    """The layer whose source stands for all of them."""
    manner = row.cache.cache_spec.rebuilding
    assert manner is not None
    found = [s for s in recomputed_layers(row.cache.stores) if s.layer.index >= manner.depth]
    if not found:
        raise CacheError(
            f"No layer from {manner.depth} on can be rebuilt: give recompute() a lower depth."
        )
    return found[0]
