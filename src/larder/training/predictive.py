"""Training of predictions across layers, for the codecs `predictive` (AQUA-KV's closed form).

Shutova et al., "Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models"
(2025), arXiv:2501.19392, section 3: layer by layer, keys are regressed on the layer below and
values on the keys of their own layer too, always on inputs as they will be decoded. What differs:
keys are taken before rotation, values of the layer below predict keys too, all kv heads are
predicted together, and the residual gets a transform in the metric of
`larder.models.measurements.transform`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.predictive import (
    Inputs,
    LinearPrediction,
    PredictiveTables,
    SidePrediction,
    fitting_step,
)
from larder.core.errors import BadParameter
from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.models.introspection import weight_inputs
from larder.models.learned_weights import Card
from larder.models.measurements.transform import OUTPUT, LayerMoments, metric_weight, weighed_klt
from larder.prefill.base import Progress
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit
from larder.training.layer_samples import (
    SINKS,
    LayerSamples,
    SampleSettings,
    read_splits,
    samples_card,
    tested_splits,
)

PREDICTIVE = "predictive"
REACH = 1024  # longest distance of a query, in the metric of keys
FIRST_SHARE = 8  # one of so many passages finds the step to fit at
Numbers = Float[Tensor, "N W"]


@dataclass(frozen=True)
class PredictiveSettings(SampleSettings):
    """Settings of the fit.

    Args:
        bits: per number, of the inputs that predictions are fitted on.
        damping: added to the second moments of the inputs, as a share of their mean.
    """

    tokens: int = 32_000
    test_tokens: int = 6_000
    bits: float = 1.5
    damping: float = 1e-3

    def __post_init__(self) -> None:
        if min(self.tokens, self.test_tokens) < 1 or self.passage_tokens <= SINKS:
            raise BadParameter(
                "predictive needs tokens and test_tokens above 0, and passage_tokens above "
                f"{SINKS}, got {self.tokens}, {self.test_tokens} and {self.passage_tokens}."
            )
        if not self.bits > 0 or not self.damping > 0:
            raise BadParameter(
                f"predictive.bits and damping must be above 0, got {self.bits}, {self.damping}."
            )


def train_predictive(
    decoder: Decoder,
    adapter: TokenizerAdapter,
    corpus: Corpus,
    settings: PredictiveSettings,
    progress: Progress,
) -> tuple[PredictiveTables, Card]:
    """Predictions of every managed layer, and what they explain of documents left out.

    Args:
        progress: called with steps done and in total: tokens read, then layers fitted.

    Raises:
        ModelError: keys cannot be rotated back, or there is nothing to train on.
    """
    layers, started = decoder.spec.managed, time.perf_counter()
    moments = {layer.index: LayerMoments.nothing(layer) for layer in layers}

    def add_moments(inputs: AttentionInputs) -> None:
        moments[inputs.layer].add(inputs, SINKS)

    samples = read_splits(decoder, adapter, corpus, settings, progress, add_moments)
    weights = metric_weights(decoder, moments)
    tables, step = fit_tables(samples[CorpusSplit.TRAIN], weights, settings)
    metrics = {"step": round(step, 4)}
    for split, own in tested_splits(samples):
        metrics |= tested(tables, own, step, split.value)
    return tables, samples_card(PREDICTIVE, decoder, corpus, samples, settings, started, metrics)


def metric_weights(
    decoder: Decoder, moments: Mapping[int, LayerMoments]
) -> list[tuple[Tensor, Tensor]]:
    """Matrices that weigh errors of the keys and values of each layer, all kv heads together."""
    layers = decoder.spec.managed
    outputs = weight_inputs(decoder.attentions, layers, [OUTPUT])
    found = list[tuple[Tensor, Tensor]]()
    for layer in layers:
        own, output = moments[layer.index], outputs[layer.index][OUTPUT].float()
        pairs = [own.metrics(head, output, REACH) for head in range(layer.kv_heads)]
        keys, values = zip(*pairs, strict=True)
        found.append(
            (
                torch.block_diag(*(metric_weight(each) for each in keys)),
                torch.block_diag(*(metric_weight(each) for each in values)),
            )
        )
    return found


def fit_tables(
    samples: LayerSamples, weights: Sequence[tuple[Tensor, Tensor]], settings: PredictiveSettings
) -> tuple[PredictiveTables, float]:
    """Tables as they are stored, and the step of the inputs that they are fitted on."""
    few = samples.some(FIRST_SHARE)
    first = _fitted(few, weights, 0.0, settings.damping)
    step = fitting_step(first, few.layer, settings.bits)
    return _fitted(samples, weights, step, settings.damping), step


def _fitted(
    samples: LayerSamples, weights: Sequence[tuple[Tensor, Tensor]], step: float, damping: float
) -> PredictiveTables:
    """Tables fitted on inputs decoded with a step; on exact ones if it is 0."""
    below, pairs = list[Numbers](), list[tuple[SidePrediction, SidePrediction]]()
    for index, own in enumerate(weights):
        decoded, sides = list[Numbers](), list[SidePrediction]()
        for numbers, weight in zip(samples.layer(index), own, strict=True):
            inputs = [*decoded, *below]
            side = fit_side(numbers, inputs, weight, damping)
            sides.append(side)
            decoded.append(_decoded(side, numbers, inputs, step))
        below = decoded
        pairs.append((sides[0], sides[1]))
    radians = tuple(torch.tensor(layer.radians) for layer in samples._specs)
    return PredictiveTables.of(PredictiveTables(tuple(pairs), radians).tensors())


def fit_side(
    numbers: Numbers, inputs: Inputs, weight: Float[Tensor, "W W"], damping: float
) -> SidePrediction:
    """Damped least squares on the inputs, and the transform of what they leave."""
    slopes, bias = least_squares(numbers, inputs, damping)
    left = numbers - LinearPrediction(slopes, bias).predicted(inputs, len(numbers))
    covariance = (left.T @ left).double() / len(left)
    forward, deviation = weighed_klt(covariance, weight)
    return SidePrediction(slopes, bias, forward.float(), deviation.float())


def least_squares(
    numbers: Numbers, inputs: Inputs, damping: float
) -> tuple[Float[Tensor, "I W"], Float[Tensor, " W"]]:
    """Weights and bias of damped least squares on the inputs; the mean alone without inputs."""
    mean = numbers.mean(0)
    if not inputs:
        return numbers.new_zeros(0, numbers.shape[1]), mean
    given = torch.cat(list(inputs), 1)
    center = given.mean(0)
    rows = given - center
    squares = (rows.T @ rows).double()
    squares += damping * squares.diagonal().mean() * torch.eye(len(squares))
    slopes = torch.linalg.solve(squares, (rows.T @ (numbers - mean)).double()).float()
    return slopes, mean - center @ slopes


def _decoded(side: SidePrediction, numbers: Numbers, inputs: Inputs, step: float) -> Numbers:
    if not step:
        return numbers
    predicted = side.predicted(inputs, len(numbers))
    components = side.components(numbers, predicted)
    return side.restored(inputs, (components / step).round() * step, torch.float32)


def tested(
    tables: PredictiveTables, samples: LayerSamples, step: float, split: str
) -> dict[str, float]:
    """Share of the variance that is predicted from decoded inputs: mean of layers, and worst."""
    below, shares = list[Numbers](), ([list[float](), list[float]()])
    for index, pair in enumerate(tables.layers):
        decoded = list[Numbers]()
        for number, (side, numbers) in enumerate(zip(pair, samples.layer(index), strict=True)):
            inputs = [*decoded, *below]
            left = numbers - side.predicted(inputs, len(numbers))
            if below:
                spread = (numbers - numbers.mean(0)).square().sum()
                shares[number].append(1 - float(left.square().sum() / spread))
            decoded.append(_decoded(side, numbers, inputs, step))
        below = decoded
    found = {f"{split}_tokens": float(samples.tokens)}
    found[f"{split}_documents"] = float(len(samples.documents))
    for name, share in zip(("keys", "values"), shares, strict=True):
        if share:
            found[f"{split}_{name}_r2"] = round(sum(share) / len(share), 4)
            found[f"{split}_{name}_worst_r2"] = round(min(share), 4)
    return found
