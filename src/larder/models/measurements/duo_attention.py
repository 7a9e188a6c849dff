"""Trained gate of each kv head: how much of its attention has to reach beyond the latest tokens.

Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads"
(2024), arXiv:2410.10819. `larder train duo_attention` trains the gates; nothing is measured here,
the numbers are those of its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from larder.core.spec import LayerSpec
from larder.core.types import TensorShapes
from larder.models.decoder import Decoder
from larder.models.learned_weights import load_learned
from larder.models.measurements.base import Granularity, Measurement, SampleText

NAME, GATES = "duo_attention", "gates"  # of the weights, and of the tensor of a layer


@dataclass(frozen=True)
class TrainedGates(Measurement):
    """Gate between 0, where a head sees only sinks and recent tokens, and 1, one per kv head."""

    granularity = Granularity.KV_HEAD
    has_cache = False

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        """Gates in the order of managed layers, then heads.

        Raises:
            ModelError: none were trained for this model.
        """
        learned = load_learned(decoder.spec, NAME, self)
        return tuple(gate for layer in learned.layers for gate in layer[GATES].tolist())

    def shapes(self, layer: LayerSpec, width: int, tensors: Mapping[str, Tensor]) -> TensorShapes:
        """Shape of the tensor of a layer, as of `GateProvider.shapes`."""
        return {GATES: (layer.kv_heads,)}


Part = TrainedGates
