"""Captured decode steps of a decoder: which batches are replayed as graphs, and why others are not.

A batch is replayed if each sequence appends one token and has all of its entries in the pages of
the decoder's arena. Every other batch runs layer by layer, and so do all steps of a model whose
steps cannot be captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_forward_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError, ModelError
from larder.models.batch_segment import BatchSegment
from larder.models.decode_graph import BATCH_SIZES, DecodeGraphs, GraphCapture, GraphContractError
from larder.models.observers import Observer
from larder.models.placement import is_offloaded
from larder.policy.providers.base import TokenProvider, column_providers

if TYPE_CHECKING:
    from larder.models.decoder import Decoder

ADAPTERS = "peft."  # modules that choose among weights by what Python holds, which no graph sees


class CapturedSteps:
    """Decode steps of a decoder as graphs.

    Graphs are captured again once a weight is in other memory. While a module has a hook, steps run
    layer by layer, since a graph calls no Python; after a module was replaced, `Decoder.use_pages`
    must be called again. Not thread-safe.

    Args:
        decoder: decoder with an arena of pages.
        capture: capture of the device.

    Attributes:
        refusal: why no step is captured; empty where steps are.
    """

    def __init__(self, decoder: Decoder, capture: GraphCapture) -> None:
        self._decoder, self._capture = decoder, capture
        modules = list(decoder.module.modules())
        self._hooks: list[Mapping[int, object]] = [_global_forward_hooks, _global_forward_pre_hooks]
        self._hooks += [hook for each in modules for hook in _hooks_of(each)]
        self._weights = [each._parameters for each in modules if each._parameters]
        self._addresses: list[int] = []
        self._graphs: DecodeGraphs | None = None
        self.refusal = _unfit_part(modules)

    def logits(
        self,
        segments: Sequence[BatchSegment],
        logit_indices: Sequence[int],
        observer: Observer | None,
    ) -> Float[Tensor, "B V"] | None:
        """Append a token to each cache, and float32 logits.

        None, with nothing done, for a batch that is not captured.

        Args:
            logit_indices: places of the logits in the batch.

        Raises:
            CacheError, InputError, ModelError: as `Decoder.forward_logits`.
        """
        if self.refusal or any(self._hooks) or not self._fits(segments, logit_indices):
            return None
        self._decoder.check(segments)
        caches, ids = [each.cache for each in segments], [each.ids[0] for each in segments]
        try:
            return self._current_graphs().step(caches, ids, observer).clone()
        except GraphContractError as error:
            self.refusal = str(error)
            return None

    def _fits(self, segments: Sequence[BatchSegment], logit_indices: Sequence[int]) -> bool:
        """True for decode steps of caches in pages whose logits are all wanted."""
        if not segments or len(segments) > BATCH_SIZES[-1]:
            return False
        if list(logit_indices) != list(range(len(segments))):
            return False
        return all(_is_step(each) and self._is_paged(each.cache) for each in segments)

    def _is_paged(self, cache: SequenceCache) -> bool:
        """True if all entries of a cache are in pages of the decoder's arena."""
        spec = self._decoder.spec
        return cache.spec.arena is spec.arena and len(cache.page_leases()) == len(spec.layers)

    def _current_graphs(self) -> DecodeGraphs:
        """Graphs of the weights where they are now.

        Raises:
            GraphContractError: the model, or the attention of its arena, cannot be captured.
        """
        addresses = [
            weight.data_ptr()
            for own in self._weights
            for weight in own.values()
            if weight is not None
        ]
        if self._graphs is None or addresses != self._addresses:
            try:
                self._graphs = DecodeGraphs(self._decoder, self._capture)
            except (CacheError, ModelError) as error:
                raise GraphContractError(str(error)) from error
            self._addresses = addresses
        return self._graphs


def describe_steps(decoder: Decoder, cache: SequenceCache) -> str:
    """Form of the decode steps of a cache, and why they are not captured graphs over pages."""
    if cache.spec.arena is None:
        return "layer by layer, without pages (pages are used by default on CUDA devices)"
    outside = [n for n, store in enumerate(cache.layers) if store.page_lease is None]
    if len(outside) == len(cache.layers):
        return f"layer by layer: {_reason(cache)}"
    if outside:
        return f"over pages, layer by layer: layers {outside} have windows or shared entries"
    if decoder.captured is None:
        return "over pages, layer by layer: nothing captures graphs on this device"
    if decoder.captured.refusal:
        return f"over pages, layer by layer: {decoder.captured.refusal}"
    return "over pages, as captured graphs"


def _reason(cache: SequenceCache) -> str:
    """Reason why no layer of a cache is in pages."""
    form = cache.cache_spec.form
    return f"its {form} cache holds more than keys, values and numbers in one precision"


def _is_step(segment: BatchSegment) -> bool:
    """True for one token behind a text without anything that runs beside the layers."""
    cache = segment.cache
    is_plain = not (segment.sections or segment.shift or segment.reread_ids or segment.images.spans)
    keeps_states = bool(column_providers(cache.cache_spec.ledger.columns, TokenProvider))
    return (
        len(segment.ids) == 1
        and is_plain
        and not keeps_states
        and not cache.recurrent.tensors
        and cache.model_positions.are_true
    )


def _hooks_of(module: nn.Module) -> list[Mapping[int, object]]:
    """Hooks on calls of a module, as the mappings that they are added to."""
    return [module._forward_hooks, module._forward_pre_hooks]


def _unfit_part(modules: Sequence[nn.Module]) -> str:
    """Reason why calls of a model depend on more than the device's memory; empty if they do not."""
    for module in modules:
        if type(module).__module__.startswith(ADAPTERS):
            return f"{type(module).__name__} chooses adapters when it is called"
        if is_offloaded(module):
            return f"weights of {type(module).__name__} are loaded when it is called"
    return ""
