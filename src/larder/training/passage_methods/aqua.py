"""Training of AQUA-KV: closed-form predictions of each layer from the decoded layer below.

Shutova et al., "Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models"
(2025), arXiv:2501.19392, section 3.2: damped least squares, layer by layer, on inputs as they will
be decoded. Released code fits on 256 sequences of 8192 tokens; here a few ten thousand tokens do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.cache.predictive import SIDES, Inputs, Layer, LinearPrediction
from larder.cache.residual_tier import AquaPredictions, DecodedTokens, ResidualCoder
from larder.core.arguments import require
from larder.core.codec import ResidualSpec
from larder.core.errors import ModelError
from larder.core.spec import LayerSpec
from larder.core.types import NamedTensors, TensorShapes
from larder.models.attention_backend import CausalAttention
from larder.models.decoder import Decoder
from larder.models.learned_weights import LayerTensors
from larder.models.measurements.transform import check_layers
from larder.ops.vector_quantization import VectorQuantizer
from larder.prefill.base import Progress
from larder.training.corpus import Passage
from larder.training.layer_samples import SINKS, LayerSamples
from larder.training.passage_method import PassageMethod
from larder.training.predictive import least_squares

Numbers = Float[Tensor, "N W"]


@dataclass(frozen=True)
class AquaTraining(PassageMethod):
    """Predictions for `aqua()`.

    Args:
        bits: of the residuals that predictions are fitted behind.
        first_bits: of the first layer.
        damping: added to the second moments of the inputs, as a share of their mean.
    """

    bits: int = 2
    first_bits: int = 4
    damping: float = 1e-3

    def __post_init__(self) -> None:
        ResidualSpec(self.bits, self.first_bits)
        require(self.damping > 0, "aqua.damping", "above 0", self.damping)

    def fit(
        self, decoder: Decoder, passages: Sequence[Passage], seed: int, progress: Progress
    ) -> Sequence[LayerTensors]:
        del seed  # a closed form
        check_layers(decoder.spec.managed)
        samples = read_samples(decoder, passages, progress)
        below, found = (), list[LayerTensors]()
        for index, layer in enumerate(decoder.spec.managed):
            predictions, below = self._fitted(samples.layer(index), below, layer, index)
            found.append(predictions.tensors())
        return found

    def test(
        self, decoder: Decoder, layers: Sequence[LayerTensors], passages: Sequence[Passage]
    ) -> Mapping[str, float]:
        """Relative squared errors with and without predictions, and the layers that gain none."""
        samples = read_samples(decoder, passages)
        errors = [*self.relative_errors(layers, samples)]
        found = dict[str, float]()
        for side, name in enumerate(SIDES):
            pairs = [pair[side] for pair in errors]
            found[f"{name}_error"] = sum(error for error, _ in pairs) / len(pairs)
            found[f"{name}_error_unpredicted"] = sum(plain for _, plain in pairs) / len(pairs)
            found[f"{name}_layers_without_gain"] = float(
                sum(error >= plain for error, plain in pairs)
            )
        return found

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        return AquaPredictions.shapes(layer, len(tensors[f"{SIDES[0]}.weight"]))

    def relative_errors(
        self, layers: Sequence[LayerTensors], samples: LayerSamples
    ) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
        """Squared errors of keys and of values in each layer, as shares of their squares.

        Pairs are of the predicted layer, and of the same quantizer without a prediction.
        """
        below: Inputs = ()
        for index, tensors in enumerate(layers):
            exact = samples.layer(index)
            quantizer = self._quantizer(exact[0].shape[1], index)
            below = _decoded(ResidualCoder(AquaPredictions.of(tensors), quantizer), exact, below)
            plain = [quantizer.decode(quantizer.encode(numbers)) for numbers in exact]
            keys, values = (
                (_share(numbers, own), _share(numbers, other))
                for numbers, own, other in zip(exact, below, plain, strict=True)
            )
            yield keys, values

    def _fitted(
        self, exact: Layer, below: Inputs, layer: LayerSpec, index: int
    ) -> tuple[AquaPredictions, DecodedTokens]:
        """Predictions of a layer, and its tokens as they are decoded with them."""
        quantizer = self._quantizer(layer.kv_heads * layer.head_dim, index)
        keys = LinearPrediction(*least_squares(exact[0], below[:1], self.damping))
        predicted = keys.predicted(below[:1], len(exact[0]))
        decoded = predicted + quantizer.decode(quantizer.encode(exact[0] - predicted))
        inputs = (decoded, *below[1:]) if below else ()
        values = LinearPrediction(*least_squares(exact[1], inputs, self.damping))
        predictions = AquaPredictions(keys, values)
        return predictions, _decoded(ResidualCoder(predictions, quantizer), exact, below)

    def _quantizer(self, width: int, index: int) -> VectorQuantizer:
        return VectorQuantizer(width, self.bits if index else self.first_bits)


def read_samples(
    decoder: Decoder, passages: Sequence[Passage], progress: Progress | None = None
) -> LayerSamples:
    """Keys before rotation and values of all managed layers on passages.

    Raises:
        ModelError: all passages are too short.
    """
    samples = LayerSamples(decoder.spec.managed)
    if all(len(passage.ids) <= SINKS for passage in passages):
        raise ModelError(
            f"Predictions are fitted to the tokens behind the first {SINKS} of a passage, and "
            "there are none: give longer texts, or more passage_tokens."
        )
    for done, passage in enumerate(passages, start=1):
        decoder.forward_uncached(passage.ids, CausalAttention(samples.add))
        if progress is not None:
            progress(done, len(passages))
    return samples


def _decoded(coder: ResidualCoder, exact: Layer, below: Inputs) -> DecodedTokens:
    """Tokens as they are decoded."""
    count = len(exact[0])
    positions, columns = exact[0].new_zeros(count).int(), exact[0].new_zeros(0, 1, count)
    return coder.decode(coder.encode(exact, below, positions, columns), below)


def _share(numbers: Numbers, decoded: Numbers) -> float:
    return float((numbers - decoded).square().sum() / numbers.square().sum())


Part = AquaTraining
