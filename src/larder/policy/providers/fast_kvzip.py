"""Provider of Fast KVzip's prediction of KVzip's score, by low-rank attention to learned sinks.

Kim et al., "Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction" (2026),
arXiv:2601.17668. A hidden state makes a key for each kv head and a query for each query head, both
normed and of few channels. Their product, with a bias, competes with the query's products with
learned sink keys, as in a softmax that has one entry and some sinks; the query heads of a group are
averaged. Tensor names are those of the released gates.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.spec import LayerSpec
from larder.core.types import HiddenStates, NamedTensors, TensorShapes
from larder.policy.providers.base import GateProvider

EPSILON = 1e-6  # of the norms


class FastKVzipGate(GateProvider):
    """Column `fast_kvzip`, in (0, 1)."""

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        base = tensors.get("k_base", torch.zeros(0, 0, 0, 0))
        sinks, channels = base.shape[-2:]
        return {
            "q_proj.weight": (layer.query_heads * channels, width),
            "q_proj.bias": (layer.query_heads * channels,),
            "k_proj.weight": (layer.kv_heads * channels, width),
            "q_norm.weight": (channels,),
            "k_norm.weight": (channels,),
            "k_base": (layer.kv_heads, 1, sinks, channels),
            "b": (layer.kv_heads, 1, layer.group),
        }

    def gate(self, states: HiddenStates, weights: NamedTensors) -> Float[Tensor, "Q K"]:
        return low_rank_gate(states.float(), weights)


def low_rank_gate(states: HiddenStates, weights: NamedTensors) -> Float[Tensor, "Q K"]:
    """Share that a token keeps against the sinks, averaged over the query heads of a group."""
    return low_rank_logits(states, weights).sigmoid().mean(-1)


def low_rank_logits(states: HiddenStates, weights: NamedTensors) -> Float[Tensor, "Q K R"]:
    """Logit of a token against the logarithm of the sinks' sum."""
    base = weights["k_base"][:, 0]  # [K, sinks, c]
    kv_heads, _, channels = base.shape
    flat = F.linear(states, weights["q_proj.weight"], weights["q_proj.bias"])
    queries = _normed(flat.view(len(flat), kv_heads, -1, channels), weights["q_norm.weight"])
    flat = F.linear(states, weights["k_proj.weight"])
    keys = _normed(flat.view(len(flat), kv_heads, channels), weights["k_norm.weight"])
    logits = torch.einsum("qkrc,qkc->qkr", queries, keys) / math.sqrt(channels) + weights["b"][:, 0]
    sinks = torch.einsum("qkrc,ksc->qkrs", queries, base) / math.sqrt(channels)
    return logits - sinks.logsumexp(-1)


def _normed(
    vectors: Float[Tensor, "*heads c"], weight: Float[Tensor, " c"]
) -> Float[Tensor, "*heads c"]:
    return F.rms_norm(vectors, weight.shape, weight, EPSILON)


Part = FastKVzipGate
