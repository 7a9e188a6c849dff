"""TRIM-KV: gates that say how fast each entry loses its worth, trained by distillation.

Bui et al., "Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs" (2025),
arXiv:2512.03324, section 4.2. The capacity is that of each head. Shrunk: inner size 72 in place of
512, M an eighth of the passage, and a bias that begins at 4.5 (paper: 10), since training takes
tens of steps here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.spec import ModelSpec
from larder.policy.providers._layer_gates import LAST
from larder.training.gated_attention import DecayedAttention
from larder.training.methods._perceptron import first_tensors
from larder.training.passage_methods._gate_distillation import RetentionGates, excess


@dataclass(frozen=True)
class TrimGates(RetentionGates):
    """Perceptron of each layer, whose output is log beta."""

    def first_layers(self, spec: ModelSpec, seed: int) -> list[dict[str, Tensor]]:
        layers = list[dict[str, Tensor]]()
        for layer in spec.managed:
            own = first_tensors(spec.width, self.inner, layer.kv_heads, seed + layer.index)
            layers.append({**own, f"{LAST}.bias": torch.full((layer.kv_heads,), self.bias)})
        return layers

    def penalty(self, attention: DecayedAttention, tokens: int) -> Float[Tensor, ""]:
        held = torch.cat([*attention.held.values()])
        return self.weight * excess(held, self.capacity * tokens)


Part = TrimGates
