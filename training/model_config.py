"""Shapes in which the embedded model is trained, and initialization of its weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

PAD, BOS, END = 0, 1, 2
SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
LONGEST = 32768
ROPE_BASE = 1e6
# Projections onto the residual stream start small, so that a deep stack starts near the identity.
ONTO_STREAM = ("o_proj.weight", "down_proj.weight")
EMBEDDING_STD, INITIAL_STD, ONTO_STREAM_SHARE = 0.02, 0.6, 0.2

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "base": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
VOCABULARY = {"tiny": 4096, "small": 4096, "base": 8192}


def config_of(size: str) -> Qwen3Config:
    """Configuration of a size, for transformers."""
    rest: dict[str, Any] = {
        "vocab_size": VOCABULARY[size],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": LONGEST,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": END,
    }
    return Qwen3Config(**SIZES[size], **rest)


def initialize_model(size: str, seed: int = 0) -> Qwen3ForCausalLM:
    """Model with random weights in float32; equal seeds give equal weights."""
    model = Qwen3ForCausalLM(config_of(size)).float()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=_initial_std(name, weight), generator=random)
    return model


def _initial_std(name: str, weight: torch.Tensor) -> float:
    if "embed" in name:
        return EMBEDDING_STD
    share = ONTO_STREAM_SHARE if name.endswith(ONTO_STREAM) else 1.0
    return share * INITIAL_STD / math.sqrt(weight.shape[1])
