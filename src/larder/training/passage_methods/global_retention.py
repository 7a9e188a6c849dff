"""Global retention gates: retention on one scale for all layers and heads, by distillation.

Bui et al., "Make Each Token Count: Towards Improving Long-Context Performance with KV Cache
Eviction" (2026), arXiv:2605.09649. As TRIM-KV, with one capacity for all heads together. Shrunk: 72
and 16 channels; what comes between the last map of a layer and the shared one is inferred (SiLU).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.spec import ModelSpec
from larder.policy.providers._layer_gates import FIRST
from larder.policy.providers.global_retention import SHARED
from larder.training.gated_attention import DecayedAttention
from larder.training.methods._perceptron import first_tensors
from larder.training.passage_methods._gate_distillation import RetentionGates, excess


@dataclass(frozen=True)
class GlobalRetentionGates(RetentionGates):
    """Two maps of each layer and one of all, whose output is log beta.

    Args:
        channels: of each kv head, which the shared map reads.
    """

    channels: int = 16

    def first_layers(self, spec: ModelSpec, seed: int) -> list[dict[str, Tensor]]:
        last = first_tensors(self.channels, 1, 1, seed)[f"{FIRST}.weight"]
        shared = {f"{SHARED}.weight": last, f"{SHARED}.bias": torch.full((1,), self.bias)}
        return [
            {
                **first_tensors(
                    spec.width, self.inner, layer.kv_heads * self.channels, seed + layer.index
                ),
                **shared,
            }
            for layer in spec.managed
        ]

    def penalty(self, attention: DecayedAttention, tokens: int) -> Float[Tensor, ""]:
        """Hinge on the sum over all heads, as a share of what they could hold."""
        held = torch.cat([*attention.held.values()])
        return self.weight * excess(held.mean(0), self.capacity * tokens)


Part = GlobalRetentionGates
