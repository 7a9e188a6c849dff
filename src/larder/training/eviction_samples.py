"""Layers of a passage in which entries are evicted, and the base of methods that are trained on
them.

    context               new tokens
    [ keys, values ... ]  [ queries, keys, values ]
      kept or evicted       attend to what is kept, and to each other

Entries are kept as H2O does: half of them the latest, the others those with the most attention of
the context's own queries.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from larder.core.errors import ModelError
from larder.core.progress import Progress, no_progress
from larder.core.registry import public_name
from larder.core.spec import LayerSpec, ModelSpec
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.decoder import Decoder
from larder.models.introspection import weight_inputs
from larder.models.learned_weights import LayerTensors
from larder.ops.attention import cap_logits, causal_attention, merge_attention, ragged_attention
from larder.ops.topk import top_masks
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit, Passage
from larder.training.passage_method import PassageLimits, PassageMethod

NEW_TOKENS = 128  # of a passage that attend to its context
LEAST_TOKENS = 2 * NEW_TOKENS + 1  # of a passage; shorter ones are left out
MOST_TOKENS = 896  # of a passage; what a longer one has behind them is left out
SHARES = (0.25, 0.125)  # of entries that are kept
LEAST_RATIO = 1e-9  # whose logarithm is taken
RECENT = 0.5  # of the kept entries that are the latest ones
Attended = tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]  # output and log-sum-exp


@dataclass(frozen=True)
class EvictionSample:
    """One layer of one passage.

    Args:
        queries: of the new tokens.
        keys, values: of the context.
        mass: attention that each entry received from the context's queries.
        among: attention of the new tokens to each other.
        target: output of attention to everything.
        layer: scaling and softcap of its attention.
    """

    queries: Float[Tensor, "H Q D"]
    keys: Float[Tensor, "K N D"]
    values: Float[Tensor, "K N D"]
    mass: Float[Tensor, "K N"]
    among: Attended
    target: Float[Tensor, "H Q D"]
    layer: LayerSpec

    @property
    def context(self) -> int:
        """Entries of a kv head."""
        return self.keys.shape[1]

    def kept_mask(self, count: int) -> Bool[Tensor, "K N"]:
        """Mask of the entries that stay, `count` of each kv head."""
        mass = self.mass.clone()
        mass[:, mass.shape[1] - self.latest(count) :] = torch.inf
        return top_masks(mass, count)

    def latest(self, count: int) -> int:
        """Entries among `count` kept ones that are the latest."""
        return round(RECENT * count)

    def selected(self, mask: Bool[Tensor, "K N"]) -> tuple[Tensor, Tensor]:
        """Keys and values [K, n, D] of a mask with as many entries of each kv head."""
        shape = len(mask), -1, self.keys.shape[2]
        return self.keys[mask].view(shape), self.values[mask].view(shape)

    def attended(self, keys: Float[Tensor, "K n D"], values: Float[Tensor, "K n D"]) -> Attended:
        """Attention of the new tokens to given entries and to each other."""
        return _attended(self.queries, keys, values, self.among, self.layer)


@dataclass(frozen=True)
class EvictionSamples:
    """Samples of one layer, and what its attention writes to the hidden state.

    Args:
        projection: output projection of each query head.
    """

    samples: list[EvictionSample]
    projection: Float[Tensor, "H D hidden"]

    def error(self, out: Float[Tensor, "H Q D"], target: Float[Tensor, "H Q D"]) -> Tensor:
        """Mean squared error of the layer's output, behind the output projection."""
        written = torch.einsum("hqd,hdn->qn", out - target, self.projection)
        return written.square().mean()


def long_passages(chosen: Mapping[CorpusSplit, list[Passage]]) -> dict[CorpusSplit, list[Passage]]:
    """Passages of each split that samples can be taken from.

    Raises:
        ModelError: all passages to train on are too short.
    """
    found = {
        split: [passage for passage in passages if len(passage.ids) >= LEAST_TOKENS]
        for split, passages in chosen.items()
    }
    if chosen[CorpusSplit.TRAIN] and not found[CorpusSplit.TRAIN]:
        raise ModelError(
            f"Evictions are sampled from passages of {LEAST_TOKENS} tokens or more, and there is "
            "none to train on: give longer texts, or more passage_tokens."
        )
    return found


def check_evictable(spec: ModelSpec, name: str) -> None:
    """Check that samples show what the layers of a model attend to.

    Raises:
        ModelError: a layer has latents or attention sinks.
    """
    if any(layer.latent_rank or layer.sinks for layer in spec.managed):
        raise ModelError(
            f"{name} cannot be trained for a model with latents (MLA) or attention sinks: choose "
            "another model, or drop()."
        )


@torch.no_grad()
def sample_evictions(
    decoder: Decoder, passages: Sequence[Passage], progress: Progress
) -> list[EvictionSamples]:
    """Samples of every managed layer, from one pass over each passage.

    Args:
        progress: called with passages done and in total.
    """
    managed = decoder.spec.managed
    projections = weight_inputs(decoder.attentions, managed, {"projection"})
    found = {
        layer.index: EvictionSamples([], projections[layer.index]["projection"].float().cpu())
        for layer in managed
    }
    layers = {layer.index: layer for layer in managed}

    def show(inputs: AttentionInputs) -> None:
        if inputs.layer in layers:
            found[inputs.layer].samples.append(_sample(inputs, layers[inputs.layer]))

    for done, passage in enumerate(passages):
        if len(passage.ids) >= LEAST_TOKENS:
            decoder.forward_uncached(passage.ids[:MOST_TOKENS], CausalAttention(show))
        progress(done + 1, len(passages))
    return [found[layer.index] for layer in managed]


def share_metrics(
    ratio: Callable[[EvictionSamples, LayerTensors, float], float],
    samples: Sequence[EvictionSamples],
    layers: Sequence[LayerTensors],
) -> dict[str, float]:
    """Layers whose error is below that of eviction, and the geometric mean of the ratios.

    `layers_better_4` and `error_ratio_4` are those where a quarter is kept.

    Args:
        ratio: error of a layer over that of eviction, for a share of kept entries.
    """
    metrics = dict[str, float]()
    for share in SHARES:
        ratios = [ratio(sample, each, share) for sample, each in zip(samples, layers, strict=True)]
        name = round(1 / share)
        metrics[f"layers_better_{name}"] = float(sum(own < 1 for own in ratios))
        logs = [math.log(max(own, LEAST_RATIO)) for own in ratios]
        metrics[f"error_ratio_{name}"] = math.exp(fmean(logs))
    return metrics


def _sample(inputs: AttentionInputs, layer: LayerSpec) -> EvictionSample:
    context = inputs.queries.shape[1] - NEW_TOKENS
    new = slice(context, None)
    queries, keys, values = (
        tensor.cpu() for tensor in (inputs.queries, inputs.keys, inputs.values)
    )
    among = causal_attention(
        queries[:, new],
        keys[:, new],
        values[:, new],
        layer.scaling,
        (NEW_TOKENS,),
        softcap=layer.softcap,
    )
    before = keys[:, :context].clone(), values[:, :context].clone()
    mass = _column_mass(queries[:, :context], keys[:, :context], layer)
    asking = queries[:, new].clone()
    target = _attended(asking, *before, among, layer)[0]
    return EvictionSample(asking, *before, mass, among, target, layer)


def _attended(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "K n D"],
    values: Float[Tensor, "K n D"],
    among: Attended,
    layer: LayerSpec,
) -> Attended:
    lengths = torch.full((len(keys),), keys.shape[1])
    starts = torch.arange(len(keys)) * keys.shape[1]
    flat = keys.flatten(0, 1), values.flatten(0, 1)
    out, lse = ragged_attention(
        queries, *flat, starts, lengths, layer.scaling, softcap=layer.softcap
    )
    return merge_attention([out, among[0]], [lse, among[1]])


def _column_mass(
    queries: Float[Tensor, "H N D"], keys: Float[Tensor, "K N D"], layer: LayerSpec
) -> Float[Tensor, "K N"]:
    """Attention that each entry receives from the queries behind it."""
    groups = queries.float().unflatten(0, (len(keys), -1))
    logits = groups @ keys[:, None].float().transpose(2, 3) * layer.scaling
    later = torch.ones(logits.shape[2:], dtype=torch.bool).triu(1)
    visible = cap_logits(logits, layer.softcap).masked_fill(later, -torch.inf)
    return visible.softmax(-1).sum((1, 2))


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
