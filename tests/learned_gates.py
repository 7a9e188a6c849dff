"""Random weights of all learned methods, so that small models can run under policies with one."""

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
    decoder.soft_prompts.put("lookahead_kv", random_soft_prompt(decoder))
    decoder.soft_prompts.put("restorekv", random_soft_prompt(decoder, tokens=8))


def random_soft_prompt(
    decoder: Decoder, seed: int = 0, tokens: int = 32
) -> list[dict[str, Tensor]]:
    """Learned tokens and updates of rank 2, as large as the weights."""
    source = torch.Generator().manual_seed(seed)
    layers: list[dict[str, Tensor]] = [{} for _ in decoder.spec.managed]
    for own, linears in zip(layers, decoder.soft_prompts.modules.linears, strict=True):
        for name, linear in linears.items():
            own[f"{name}.down"] = torch.randn(2, linear.in_features, generator=source) / 8
            own[f"{name}.up"] = torch.randn(linear.out_features, 2, generator=source) / 8
    layers[0]["embeddings"] = torch.randn(tokens, decoder.spec.width, generator=source)
    return layers
