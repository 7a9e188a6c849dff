"""Base of methods that are fitted to evictions of passages, one layer at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from larder.core.family import public_name
from larder.core.progress import Progress, no_progress
from larder.core.spec import LayerSpec
from larder.models.decoder import Decoder
from larder.models.learned_weights import LayerTensors
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit, Passage
from larder.training.eviction_samples import (
    EvictionSamples,
    check_evictable,
    long_passages,
    sample_evictions,
    share_metrics,
)
from larder.training.passage_method import PassageLimits, PassageMethod


class EvictionMethod(PassageMethod):
    """Method whose layers are fitted alone, each to what H2O evicts of the passages."""

    @abstractmethod
    def fit_layer(
        self, layer: LayerSpec, samples: EvictionSamples, source: torch.Generator
    ) -> LayerTensors:
        """Tensors of one layer."""

    @abstractmethod
    def error_ratio(self, samples: EvictionSamples, tensors: LayerTensors, share: float) -> float:
        """Error of a layer over that of eviction alone, with a share of the entries."""

    def passages(
        self, corpus: Corpus, adapter: TokenizerAdapter, limits: PassageLimits
    ) -> dict[CorpusSplit, list[Passage]]:
        return long_passages(super().passages(corpus, adapter, limits))

    def fit(
        self, decoder: Decoder, passages: Sequence[Passage], seed: int, progress: Progress
    ) -> list[LayerTensors]:
        check_evictable(decoder.spec, public_name(type(self)))
        layers = decoder.spec.managed
        total = len(passages) + len(layers)
        found = sample_evictions(decoder, passages, lambda done, _: progress(done, total))
        trained = list[LayerTensors]()
        for layer, tensors in zip(layers, found, strict=True):
            source = torch.Generator().manual_seed(seed * 1000 + layer.index)
            trained.append(self.fit_layer(layer, tensors, source))
            progress(len(passages) + len(trained), total)
        return trained

    def test(
        self, decoder: Decoder, layers: Sequence[LayerTensors], passages: Sequence[Passage]
    ) -> dict[str, float]:
        """Errors of the layers over those of eviction alone, as of `error_ratio`."""
        found = sample_evictions(decoder, passages, no_progress)
        return share_metrics(self.error_ratio, found, layers)
