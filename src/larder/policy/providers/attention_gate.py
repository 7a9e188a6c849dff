"""Provider of Attention-Gate's decision which tokens a layer keeps, from a small attention.

Zeng et al., "In-context KV-Cache Eviction for LLMs via Attention-Gate" (2024), arXiv:2410.12876. A
multi-head attention of few channels over the layer's input, a linear map and a sigmoid give each
token and kv head a number; from 1/2 on it is kept. A token attends to itself and those before it
that are read in the same pass (inferred: that later tokens do not change a decision, and that those
of earlier passes take no part, so that no keys of the gate are cached).
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.spec import LayerSpec
from larder.core.types import HiddenStates, NamedTensors, TensorShapes
from larder.policy.providers.base import GateProvider

QUERY, KEY, VALUE, OUTPUT = "query", "key", "value", "output"


class AttentionGate(GateProvider):
    """Column `attention_gate`, in (0, 1); as many heads as the layer has kv heads."""

    reads_pass = True

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        inner = tensors[f"{QUERY}.bias"].numel() if f"{QUERY}.bias" in tensors else 0
        inner -= inner % layer.kv_heads
        return {
            f"{QUERY}.weight": (inner, width),
            f"{QUERY}.bias": (inner,),
            f"{KEY}.weight": (inner, width),
            f"{VALUE}.weight": (inner, width),
            f"{VALUE}.bias": (inner,),
            f"{OUTPUT}.weight": (layer.kv_heads, inner),
            f"{OUTPUT}.bias": (layer.kv_heads,),
        }

    def gate(self, states: HiddenStates, weights: NamedTensors) -> Float[Tensor, "Q K"]:
        tokens, heads = len(states), len(weights[f"{OUTPUT}.bias"])
        queries, keys, values = (
            F.linear(states.float(), weights[f"{name}.weight"], weights.get(f"{name}.bias"))
            .view(tokens, heads, -1)
            .transpose(0, 1)
            for name in (QUERY, KEY, VALUE)
        )  # [K, Q, c]
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        flat = mixed.transpose(0, 1).reshape(tokens, -1)
        return F.linear(flat, weights[f"{OUTPUT}.weight"], weights[f"{OUTPUT}.bias"]).sigmoid()


Part = AttentionGate
