"""Keys and values of all layers on passages of a corpus, that tables of a codec are fitted to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from larder.cache.predictive import Layer, side_by_side
from larder.core.errors import ModelError
from larder.core.spec import LayerSpec
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.decoder import Decoder
from larder.models.learned_weights import Card
from larder.models.measurements.transform import check_layers
from larder.prefill.base import Progress
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit

SINKS = 4  # first tokens of a passage, which are not learned from


@dataclass(frozen=True)
class SampleSettings:
    """Size of the samples.

    Args:
        tokens: read to fit, at most; 23 KB of memory each for SmolLM2.
        test_tokens: of each other split, at most.
        passage_tokens: read together.
        seed: of the order of documents, and of what is drawn.
    """

    tokens: int
    test_tokens: int
    passage_tokens: int = 1024
    seed: int = 0


class LayerSamples:
    """Keys before rotation and values of all layers on some passages, in float16.

    Args:
        layers: in order.
    """

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self.layers = {layer.index: index for index, layer in enumerate(layers)}
        self.tokens, self.documents = 0, set[str]()
        self._specs, self._parts = tuple(layers), [list[tuple[Tensor, Tensor]]() for _ in layers]

    def add(self, inputs: AttentionInputs) -> None:
        """Add the tokens of one call to a managed layer, the first ones left out."""
        if inputs.layer not in self.layers:
            return
        index = self.layers[inputs.layer]
        radians = torch.tensor(self._specs[index].radians)
        positions = torch.arange(inputs.keys.shape[1])
        sides = (
            side_by_side(inputs.keys.cpu(), positions, radians),
            side_by_side(inputs.values.cpu(), positions),
        )
        self._parts[index].append((sides[0][SINKS:].half(), sides[1][SINKS:].half()))

    def layer(self, index: int) -> Layer:
        """Keys and values of one layer, in float32."""
        keys, values = (torch.cat(parts) for parts in zip(*self._parts[index], strict=True))
        return keys.float(), values.float()

    def some(self, share: int) -> LayerSamples:
        """One of so many passages, at least one."""
        found = LayerSamples(self._specs)
        found._parts = [parts[::share] for parts in self._parts]
        return found


def read_splits(
    decoder: Decoder,
    adapter: TokenizerAdapter,
    corpus: Corpus,
    settings: SampleSettings,
    progress: Progress,
    show_trained: Callable[[AttentionInputs], None] = lambda inputs: None,
) -> dict[CorpusSplit, LayerSamples]:
    """Samples of each split, until it has its tokens.

    Args:
        progress: called with training tokens read and in total.
        show_trained: called with each managed layer's inputs on passages that are trained on.

    Raises:
        ModelError: keys cannot be rotated back, or there is nothing to train on.
    """
    check_layers(decoder.spec.managed)
    limits = dict.fromkeys(CorpusSplit, settings.test_tokens) | {CorpusSplit.TRAIN: settings.tokens}
    samples = {split: LayerSamples(decoder.spec.managed) for split in CorpusSplit}
    trained = samples[CorpusSplit.TRAIN]
    for passage in corpus.passages(adapter, settings.passage_tokens, settings.seed):
        own = samples[passage.split]
        if all(samples[split].tokens >= limits[split] for split in CorpusSplit):
            break
        if own.tokens >= limits[passage.split] or len(passage.ids) <= SINKS:
            continue

        def show(inputs: AttentionInputs, samples: LayerSamples = own) -> None:
            samples.add(inputs)
            if samples is trained and inputs.layer in samples.layers:
                show_trained(inputs)

        decoder.forward_uncached(passage.ids, CausalAttention(show))
        own.tokens += len(passage.ids) - SINKS
        own.documents.add(passage.document)
        progress(min(trained.tokens, settings.tokens), settings.tokens)
    if not trained.tokens:
        raise ModelError(
            "The corpus has no training document: give more texts, or fewer passage_tokens."
        )
    return samples


def tested_splits(
    samples: Mapping[CorpusSplit, LayerSamples],
) -> Iterator[tuple[CorpusSplit, LayerSamples]]:
    """Samples that were not trained on, where there are any."""
    for split in (CorpusSplit.TEST, CorpusSplit.HELD_OUT):
        if samples[split].tokens:
            yield split, samples[split]


def samples_card(
    method: str,
    decoder: Decoder,
    corpus: Corpus,
    samples: Mapping[CorpusSplit, LayerSamples],
    settings: SampleSettings,
    started: float,
    metrics: Mapping[str, float],
) -> Card:
    """Card of tables that were fitted to samples.

    Args:
        started: reading of `time.perf_counter`.
    """
    return Card(
        method,
        (decoder.spec.fingerprint,),
        corpus.digest[:16],
        samples[CorpusSplit.TRAIN].tokens,
        settings.seed,
        round(time.perf_counter() - started, 1),
        metrics,
        asdict(settings),
    )
