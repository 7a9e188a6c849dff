"""Tiny models with random weights for tests and benchmarks, one per architecture, no download.

Weights have a larger spread than usual initialization, so that heads differ and attention is far
from uniform: a wrong head mapping or a position off by one changes the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from larder.core import BadParameter, UnknownName, unknown_name_message

VOCABULARY = 128
HEAD_DIM = 16
QUERY_HEADS = 4
WINDOW_TOKENS = 8  # of Gemma3's sliding-window layers
SPREAD = 0.15  # standard deviation of the weights

_SLIDING, _FULL = "sliding_attention", "full_attention"
# Architecture -> the classes of its configuration and of its model in transformers.
_CLASSES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "mistral": ("MistralConfig", "MistralForCausalLM"),
        "phi3": ("Phi3Config", "Phi3ForCausalLM"),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    }
)
ARCHITECTURES = tuple(_CLASSES)


def tiny(
    architecture: str,
    *,
    kv_heads: int = 2,
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    head_dim: int = HEAD_DIM,
) -> Any:
    """Random model of a few thousand weights in eval mode, reproducible by seed.

    Gemma3 alternates full attention with sliding windows of 8 tokens.

    Args:
        architecture: one of `ARCHITECTURES`.
        kv_heads: K; there are 4 query heads, so 4 is multi-head, 2 grouped, 1 multi-query.
        layers: L.
        seed: of the weights.
        head_dim: D, of the architectures that have it in their configuration.

    Raises:
        UnknownName: no such architecture; the message lists the known ones.
        BadParameter: kv_heads does not divide the query heads.
    """
    if architecture not in _CLASSES:
        raise UnknownName(
            unknown_name_message("tiny architecture", architecture, list(ARCHITECTURES))
        )
    if kv_heads < 1 or QUERY_HEADS % kv_heads:
        raise BadParameter(f"tiny.kv_heads must divide {QUERY_HEADS}, got {kv_heads}.")
    import transformers

    config_name, model_name = _CLASSES[architecture]
    options = _common_options(kv_heads, layers)
    options |= _architecture_options(architecture, layers, head_dim)
    config = getattr(transformers, config_name)(**options)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # generators of accelerators are not touched
        module = getattr(transformers, model_name)(config)
        spread_vectors(module)
    return module.to(dtype).eval()


def _common_options(kv_heads: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": QUERY_HEADS * HEAD_DIM,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": kv_heads,
        "initializer_range": SPREAD,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _architecture_options(architecture: str, layers: int, head_dim: int) -> dict[str, Any]:
    """Additional configuration of one architecture."""
    if architecture == "gemma3":
        kinds = [_FULL if index % 2 else _SLIDING for index in range(layers)]
        scalar = {"query_pre_attn_scalar": 2 * head_dim}  # a scaling that is not 1 / sqrt(D)
        return scalar | {
            "head_dim": head_dim,
            "sliding_window": WINDOW_TOKENS,
            "layer_types": kinds,
        }
    if architecture == "mistral":
        return {"sliding_window": None}
    return {"head_dim": head_dim} if architecture in {"llama", "qwen3"} else {}


@torch.no_grad()
def spread_vectors(module: Any) -> None:
    """Add noise to biases and norms: constants would hide code that ignores them."""
    for weight in module.parameters():
        if weight.ndim == 1:
            weight.add_(torch.randn_like(weight) * SPREAD)
