"""Training through the whole model: methods that read passages in place of labels."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from larder.core.errors import BadParameter, ModelError
from larder.core.registry import Family, public_name
from larder.core.spec import LayerSpec
from larder.core.types import NamedTensors, TensorShapes
from larder.models.attention_backend import LayerAttention, RenumberedAttention
from larder.models.decoder import Decoder
from larder.models.introspection import call_uncached
from larder.models.learned_weights import Card, LayerTensors, LearnedWeights
from larder.prefill.base import Progress
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit, Passage

PASSAGE_METHODS = Family("method trained on passages", "larder.training.passage_methods")


@dataclass(frozen=True)
class PassageLimits:
    """Passages that a method is trained and tested on.

    Args:
        tokens: trained on, at most.
        test_tokens: of each other split, at most; 0 for no test.
        passage_tokens: read together, without the chat template.
        seed: of the order of documents, and of the training.
    """

    tokens: int = 40_000
    test_tokens: int = 6_000
    passage_tokens: int = 768
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens, self.passage_tokens) < 1 or self.test_tokens < 0:
            raise BadParameter(
                "Training needs tokens and passage_tokens above 0, and test_tokens of 0 or more, "
                f"got {self.tokens}, {self.passage_tokens} and {self.test_tokens}."
            )


class PassageMethod(ABC):
    """Base class of methods trained on passages: frozen dataclasses whose fields are settings.

    The name of the file is that of the policy part whose weights are trained.
    """

    def passages(
        self, corpus: Corpus, adapter: TokenizerAdapter, limits: PassageLimits
    ) -> dict[CorpusSplit, list[Passage]]:
        """Passages of each split that the method is trained and tested on; by default the plain
        text of documents.
        """
        return select_passages(corpus.passages(adapter, limits.passage_tokens, limits.seed), limits)

    @abstractmethod
    def fit(
        self, decoder: Decoder, passages: Sequence[Passage], seed: int, progress: Progress
    ) -> Sequence[LayerTensors]:
        """Tensors of every managed layer, in order.

        Args:
            progress: called with steps done and in total.
        """

    @abstractmethod
    def test(
        self, decoder: Decoder, layers: Sequence[LayerTensors], passages: Sequence[Passage]
    ) -> Mapping[str, float]:
        """Metrics on passages that were not trained on."""

    @abstractmethod
    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        """Shape that each tensor of a layer must have, as of `GateProvider.shapes`."""


def train_on_passages(
    method: PassageMethod,
    decoder: Decoder,
    adapter: TokenizerAdapter,
    corpus: Corpus,
    limits: PassageLimits,
    progress: Progress,
) -> LearnedWeights:
    """Weights of every managed layer, measured on documents that were not trained on.

    Raises:
        ModelError: there is nothing to train on, or training diverged.
    """
    chosen = method.passages(corpus, adapter, limits)
    trained = chosen[CorpusSplit.TRAIN]
    if not trained:
        raise ModelError(
            "The corpus has no training document: give more texts, or fewer passage_tokens."
        )
    started, name = time.perf_counter(), public_name(type(method))
    with frozen(decoder.module):
        layers = tuple(method.fit(decoder, trained, limits.seed, progress))
    _check_finite(layers, name)
    seconds = round(time.perf_counter() - started, 1)
    card = Card(
        name,
        (decoder.spec.fingerprint,),
        corpus.digest[:16],
        sum(len(passage.ids) for passage in trained),
        limits.seed,
        seconds,
        _test_metrics(method, decoder, layers, chosen),
        _settings(method),
    )
    return LearnedWeights(card, layers)


def measure_on_passages(
    method: PassageMethod,
    decoder: Decoder,
    adapter: TokenizerAdapter,
    corpus: Corpus,
    limits: PassageLimits,
    learned: LearnedWeights,
) -> LearnedWeights:
    """Weights whose card has metrics on the documents that a training on the corpus leaves out.

    Whether they were trained on another corpus, which may have these documents, cannot be seen.

    Args:
        limits: `tokens` is not used.

    Raises:
        ModelError: the corpus leaves out no document, or `test_tokens` is 0.
    """
    chosen = method.passages(corpus, adapter, replace(limits, tokens=1))
    metrics = _test_metrics(method, decoder, learned.layers, chosen)
    if not metrics:
        raise ModelError(
            "The corpus leaves out no document to test with: give more texts, fewer "
            "passage_tokens, or test_tokens above 0."
        )
    return replace(learned, card=replace(learned.card, metrics=metrics))


def select_passages(
    passages: Iterable[Passage], limits: PassageLimits
) -> dict[CorpusSplit, list[Passage]]:
    """Passages of each split, until it has its tokens."""
    wanted = dict.fromkeys(CorpusSplit, limits.test_tokens) | {CorpusSplit.TRAIN: limits.tokens}
    chosen = {split: list[Passage]() for split in CorpusSplit}
    for passage in passages:
        if wanted[passage.split] > 0:
            wanted[passage.split] -= len(passage.ids)
            chosen[passage.split].append(passage)
        if max(wanted.values()) <= 0:
            break
    return chosen


def differentiable_states(
    decoder: Decoder,
    ids: Sequence[int],
    attention: LayerAttention,
    positions: Int[Tensor, " T"] | None = None,
) -> Float[Tensor, "T hidden"]:
    """Hidden states behind the last norm, under another attention that gradients pass through.

    Inside `frozen` no weight of the model takes a gradient, which saves their share of the time.

    Args:
        positions: of the tokens; None counts from 0.
    """
    with torch.enable_grad(), decoder.attention:
        renumbered = RenumberedAttention(attention, decoder.spec)
        return call_uncached(decoder.body, ids, renumbered, positions)


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Context in which no weight of a model takes a gradient."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)


def distillation_loss(
    teacher: Float[Tensor, "N V"], student: Float[Tensor, "N V"]
) -> Float[Tensor, ""]:
    """Mean KL(teacher || student) of two rows of logits, in nats."""
    return F.kl_div(
        student.float().log_softmax(-1),
        teacher.float().log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )


def _test_metrics(
    method: PassageMethod,
    decoder: Decoder,
    layers: Sequence[LayerTensors],
    chosen: Mapping[CorpusSplit, Sequence[Passage]],
) -> dict[str, float]:
    """Metrics, documents and tokens of the splits that were not trained on."""
    metrics = dict[str, float]()
    for split in (CorpusSplit.TEST, CorpusSplit.HELD_OUT):
        if chosen[split]:
            found = method.test(decoder, layers, chosen[split])
            metrics |= {f"{split.value}_{key}": round(value, 4) for key, value in found.items()}
            metrics |= _sizes(split, chosen[split])
    return metrics


def _check_finite(layers: Sequence[LayerTensors], name: str) -> None:
    for index, layer in enumerate(layers):
        if not all(bool(tensor.isfinite().all()) for tensor in layer.values()):
            raise ModelError(
                f"Training {name} diverged in layer {index}: take another seed, or more tokens."
            )


def _sizes(split: CorpusSplit, passages: Sequence[Passage]) -> dict[str, float]:
    return {
        f"{split.value}_documents": float(len({passage.document for passage in passages})),
        f"{split.value}_tokens": float(sum(len(passage.ids) for passage in passages)),
    }


def _settings(method: PassageMethod) -> dict[str, Any]:
    return asdict(method)  # pyright: ignore
