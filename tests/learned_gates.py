"""Random weights for every learned gate, so that small models can run under policies with one."""

from __future__ import annotations

import torch
from torch import Tensor

from larder.core import LayerSpec, ModelSpec
from larder.models import Card, Decoder, LearnedWeights
from larder.policy import PROVIDERS, GateProvider, select_providers

INNER, CHANNELS, SINKS = 5, 4, 3
# Sizes that training chooses, in the tensors that gates read them from.
SIZES = {
    "0.bias": torch.zeros(INNER),
    "4.weight": torch.zeros(1, CHANNELS),
    "query.bias": torch.zeros(2 * CHANNELS),
    "k_base": torch.zeros(1, 1, SINKS, CHANNELS),
}


def every_gate() -> dict[str, GateProvider]:
    return select_providers(PROVIDERS.names(), GateProvider)


def random_tensors(
    gate: GateProvider, layer: LayerSpec, width: int, seed: int = 0
) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1000 * seed + layer.index)
    shapes = gate.shapes(layer, width, SIZES)
    return {name: torch.randn(shape, generator=source) / 2 for name, shape in shapes.items()}


def random_weights(name: str, gate: GateProvider, spec: ModelSpec, seed: int = 0) -> LearnedWeights:
    card = Card(name, (spec.fingerprint,), seed=seed)
    layers = [random_tensors(gate, layer, spec.width, seed) for layer in spec.managed]
    shared = {name: layers[0][name] for name in gate.shared}
    return LearnedWeights(card, tuple({**own, **shared} for own in layers))


def give_gates(decoder: Decoder) -> None:
    for name, gate in every_gate().items():
        decoder.gates.put(name, gate, random_weights(name, gate, decoder.spec))
