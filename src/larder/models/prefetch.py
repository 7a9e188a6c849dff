"""Finding what the next layer will recall while this one computes.

Mao, Wang, Ester, Li, "IceCache: Memory-efficient KV-cache Management for Long-Sequence LLMs"
(2026), arXiv:2604.10539, section 3.1: what enters a layer's attention, passed through the next
layer's query projection, is close to that layer's own queries. A worker thread makes these queries,
searches with them and moves pages, in the order of the layers; each layer waits for its own. The
first layer that parks anything has none before it that does, and searches in its turn, and one that
uses what another found need not search at all. As in the released code; here the next layer's whole
attention module is asked, with attention that answers zeros, so that any architecture will do.

The worker lives as long as the pass. If it fails, the pass goes on without it, as all later ones
of these caches do, and one warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from larder.cache.forms.tiered import TieredLayer
from larder.core.errors import ModelError
from larder.core.types import AppendKind, Keys, Queries, Values
from larder.models.forward_batch import BatchSegment

CONTEXT_KEYWORD = "larder"  # by which a pass comes down the model's call


class QueryProbe:
    """Stands in for a pass, answers zeros, and notes the queries."""

    def __init__(self) -> None:
        self.queries: Queries | None = None

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        scaling: float,
        sliding_window: int | None,
    ) -> Queries:
        del layer, keys, values, scaling, sliding_window
        self.queries = queries
        return torch.zeros_like(queries)


def attention_modules(model: Any) -> dict[int, nn.Module]:
    """The attention module of each layer of a model: the innermost that says which it is."""
    numbered = [each for each in model.modules() if isinstance(_layer_index(each), int)]
    inner = [m for m in numbered if not any(n is not m and n in numbered for n in m.modules())]
    return {module.layer_idx: module for module in inner}


class LayerPrefetch:
    """Fetches for one pass, while the `with` block lasts.

    Args:
        modules: attention modules by layer.
        journey: the pass itself, as it comes down the model's call.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], rows: Sequence[BatchSegment], journey: object
    ):
        self._modules, self._journey = modules, journey
        self._tiers = _prefetchable_tiers(rows)
        self._ends = [sum(row.width for row in rows[: n + 1]) - 1 for n in range(len(rows))]
        self._worker: ThreadPoolExecutor | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        upcoming = list(self._tiers)[1:]
        if not upcoming:
            return
        self._worker = ThreadPoolExecutor(1, "larder-ahead")
        for layer in upcoming:
            before = self._modules[layer - 1]
            self._hooks.append(before.register_forward_pre_hook(self._launch, with_kwargs=True))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        for tiers in self._tiers.values():
            for tier in tiers:
                tier.finder.expect(None)

    def _launch(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Called before a layer's attention, with what enters it."""
        if self._worker is None or named.get(CONTEXT_KEYWORD) is not self._journey:
            return
        layer = _layer_index(module) + 1
        tiers = self._tiers[layer]
        if not all(tier.finder.fetches_ahead for tier in tiers):
            return
        told = self._modules[layer], args, named, tiers, self._ends
        fetching = self._worker.submit(_fetch, *told)
        for tier in tiers:
            tier.finder.expect(self._completion(fetching))

    def _completion(self, fetching: Future[None]) -> Callable[[], bool]:
        """Waits for the worker; says whether it is done with what it was to do."""

        def arrived() -> bool:
            fault = fetching.exception()
            if fault is not None and self._tiers_ahead():
                for tier in self._tiers_ahead():
                    tier.finder.fetches_ahead = False
                warnings.warn(
                    f"Fetching pages ahead failed ({type(fault).__name__}: {fault}): from now on "
                    "every layer searches in its turn. Answers are those of recall without "
                    "fetch='ahead'.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return fault is None

        return arrived

    def _tiers_ahead(self) -> list[TieredLayer]:
        return [
            tier for tiers in self._tiers.values() for tier in tiers if tier.finder.fetches_ahead
        ]


def _fetch(
    module: nn.Module,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    tiers: Sequence[TieredLayer],
    ends: Sequence[int],
) -> None:
    """In the worker: what the next layer would ask, and the pages for it, row by row."""
    foresight = QueryProbe()
    with torch.no_grad():
        module(*args, **{**named, CONTEXT_KEYWORD: foresight})
        if foresight.queries is None:
            raise ModelError(f"{type(module).__name__} called no attention.")
        queries: Tensor = foresight.queries
        for end, tier in zip(ends, tiers, strict=True):
            tier.fetch(queries[:, end : end + 1])


def _prefetchable_tiers(rows: Sequence[BatchSegment]) -> dict[int, list[TieredLayer]]:
    """Layers in which every row has pages to find, and finds them ahead; none unless in steps."""
    if not rows or any(len(row.ids) != 1 or row.coming is not AppendKind.STEP for row in rows):
        return {}
    tiers = [
        [
            t
            for t in row.cache.tiers
            if t.has_offloaded and t.leader is None and t.finder.fetches_ahead
        ]
        for row in rows
    ]
    ready = [{tier.layer.index: tier for tier in own} for own in tiers]
    common = [i for i in ready[0] if all(i in own for own in ready)]
    return {i: [own[i] for own in ready] for i in common}


def _layer_index(module: nn.Module) -> Any:
    return getattr(module, "layer_idx", None)
