"""Prefetch of offloaded pages for the next layer while the current layer computes.

Mao, Wang, Ester, Li, "IceCache: Memory-efficient KV-cache Management for Long-Sequence LLMs"
(2026), arXiv:2604.10539, section 3.1: the input of a layer's attention, passed through the next
layer's query projection, approximates that layer's queries. A worker thread computes these queries,
searches with them and moves pages, in layer order; each layer waits for its own pages. The first
layer with offloaded pages has no predecessor and searches itself; a layer that shares the result of
another does not search. As in the released code; here the next layer's whole attention module runs,
with attention that returns zeros, so that any architecture works.

The worker lives as long as the forward batch. If it fails, this forward and all later ones of these
caches continue without prefetch, after one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from larder.cache.forms.tiered import TieredLayer
from larder.core.errors import ModelError
from larder.core.types import AppendKind
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import CONTEXT_KEYWORD, AttentionProbe
from larder.models.batch_segment import BatchSegment


class LayerPrefetch:
    """Prefetch of pages during one forward batch.

    Args:
        modules: attention modules by layer index.
        segments: segments of the batch; no prefetch unless all are decode steps.
        batch: the batch in the model's call.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], segments: Sequence[BatchSegment], batch: object
    ):
        self._modules, self._batch = modules, batch
        self._tiers = _prefetchable_tiers(segments)
        self._ends = [
            sum(segment.num_tokens for segment in segments[: n + 1]) - 1
            for n in range(len(segments))
        ]
        self._worker: ThreadPoolExecutor | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which pages are fetched ahead."""
        upcoming = list(self._tiers)[1:]
        if not upcoming:
            yield
            return
        self._worker = ThreadPoolExecutor(1, "larder-prefetch")
        try:
            with forward_hooks(self._before(layer) for layer in upcoming):
                yield
        finally:
            self._worker.shutdown(wait=True, cancel_futures=True)
            for tiers in self._tiers.values():
                for tier in tiers:
                    tier.fetcher.expect(None)

    def _before(self, layer: int) -> RemovableHandle:
        """Hook on the layer before one whose pages are fetched."""
        launch = partial(self._launch, layer)
        return self._modules[layer - 1].register_forward_pre_hook(launch, with_kwargs=True)

    def _launch(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Forward pre-hook of an attention module: start the fetch of the next layer."""
        if self._worker is None or named.get(CONTEXT_KEYWORD) is not self._batch:
            return
        tiers = self._tiers[layer]
        if not all(tier.fetcher.fetches_ahead for tier in tiers):
            return
        fetch = self._worker.submit(_fetch, self._modules[layer], args, named, tiers, self._ends)
        for tier in tiers:
            tier.fetcher.expect(self._completion(fetch))

    def _completion(self, fetch: Future[None]) -> Callable[[], bool]:
        """Callback that waits for the worker, and returns True if the fetch succeeded."""

        def completed() -> bool:
            fault = fetch.exception()
            if fault is not None and self._tiers_ahead():
                for tier in self._tiers_ahead():
                    tier.fetcher.fetches_ahead = False
                warnings.warn(
                    f"Fetching pages ahead failed ({type(fault).__name__}: {fault}): from now on "
                    "every layer searches for itself. Answers are those of recall without "
                    "fetch='ahead'.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return fault is None

        return completed

    def _tiers_ahead(self) -> list[TieredLayer]:
        return [
            tier for tiers in self._tiers.values() for tier in tiers if tier.fetcher.fetches_ahead
        ]


def _fetch(
    module: nn.Module,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    tiers: Sequence[TieredLayer],
    ends: Sequence[int],
) -> None:
    """Worker task: predict the queries of the next layer, and fetch the pages of each segment."""
    probe = AttentionProbe()
    with torch.no_grad():
        module(*args, **{**named, CONTEXT_KEYWORD: probe})
        if not probe.seen:
            raise ModelError(f"{type(module).__name__} called no attention.")
        (inputs,) = probe.seen.values()
        for end, tier in zip(ends, tiers, strict=True):
            tier.fetch(inputs.queries[:, end : end + 1])


def _prefetchable_tiers(segments: Sequence[BatchSegment]) -> dict[int, list[TieredLayer]]:
    """Tiered layers by index in which every segment can prefetch; none outside decode steps."""
    if not segments or any(
        len(segment.ids) != 1 or segment.append_kind is not AppendKind.STEP for segment in segments
    ):
        return {}
    tiers = [
        [
            t
            for t in segment.cache.tiers
            if t.has_offloaded and t.leader is None and t.fetcher.fetches_ahead
        ]
        for segment in segments
    ]
    ready = [{tier.layer.index: tier for tier in layers} for layers in tiers]
    common = [i for i in ready[0] if all(i in layers for layers in ready)]
    return {i: [layers[i] for layers in ready] for i in common}
