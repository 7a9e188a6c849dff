"""Attention-Gate: a small attention that decides which tokens a head keeps, by distillation.

Zeng et al., "In-context KV-Cache Eviction for LLMs via Attention-Gate" (2024), arXiv:2410.12876. A
pass attends to the keys that its gates keep, and every token to itself; the choice at 1/2 passes
the gradient of the gate on. The loss is KL to the model itself, where the paper continues language
modeling, plus the distance of the share that is kept from a target. Gates begin open. Inferred: the
weight of that distance, and heads of 16 channels. Here a token also sees 4 sinks and the latest 32
tokens, which policies protect; without them tens of steps do not even find the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec, ModelSpec
from larder.models.decoder import Decoder
from larder.policy.protect import ProtectedTokens
from larder.policy.providers._layer_gates import FIRST, LAST
from larder.policy.providers.attention_gate import KEY, OUTPUT, QUERY, VALUE
from larder.training.gated_attention import KEPT_FROM, LayerGate, MaskedAttention, straight_through
from larder.training.methods._perceptron import first_tensors
from larder.training.passage_methods._gate_distillation import GateDistillation


@dataclass(frozen=True)
class AttentionGates(GateDistillation[MaskedAttention]):
    """Small attention of each layer, with as many heads as it has kv heads.

    Args:
        inner: channels of each head.
        kept: target of the mean gate.
        weight: of the distance from it.
        bias: of the gate's logit before training.
        sinks: first tokens that are always seen; 0 in the paper.
        recent: latest tokens that are always seen, its own included; 1 in the paper.
    """

    inner: int = 16
    kept: float = 0.25
    weight: float = 2.0
    bias: float = 1.0
    sinks: int = 4
    recent: int = 32
    first_maps = (QUERY, KEY, VALUE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.kept <= 1 or min(self.weight, self.sinks) < 0 or self.recent < 1:
            raise BadParameter(
                "attention_gate needs a share kept in (0, 1], weight and sinks of 0 or more, and "
                f"recent tokens above 0, got {self}."
            )

    def first_layers(self, spec: ModelSpec, seed: int) -> list[dict[str, Tensor]]:
        return [self._first_layer(layer, spec.width, seed) for layer in spec.managed]

    def attention(self, decoder: Decoder, gate: LayerGate) -> MaskedAttention:
        return MaskedAttention(decoder, gate, ProtectedTokens(self.sinks, self.recent))

    def penalty(self, attention: MaskedAttention, tokens: int) -> Float[Tensor, ""]:
        flags = straight_through(torch.cat([*attention.gates.values()]))
        return self.weight * (flags.mean() - self.kept).abs()

    def measures(self, attention: MaskedAttention, tokens: int) -> dict[str, float]:
        """Share of the tokens that heads keep."""
        gates = torch.cat([*attention.gates.values()])
        return {"kept": float((gates >= KEPT_FROM).float().mean())}

    def _first_layer(self, layer: LayerSpec, width: int, seed: int) -> dict[str, Tensor]:
        heads = layer.kv_heads
        query, key, value = (
            first_tensors(width, heads * self.inner, heads, 3 * (seed + layer.index) + number)
            for number in range(3)
        )
        return {
            f"{QUERY}.weight": query[f"{FIRST}.weight"],
            f"{QUERY}.bias": query[f"{FIRST}.bias"],
            f"{KEY}.weight": key[f"{FIRST}.weight"],
            f"{VALUE}.weight": value[f"{FIRST}.weight"],
            f"{VALUE}.bias": value[f"{FIRST}.bias"],
            f"{OUTPUT}.weight": value[f"{LAST}.weight"],
            f"{OUTPUT}.bias": torch.full((heads,), self.bias),
        }


Part = AttentionGates
