"""Models and texts that benchmarks share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from larder.models import Decoder, load
from larder_bench.demo_conversation import demo_conversation
from larder_bench.random_models import random_config


def load_model(name: str) -> tuple[Any, Decoder]:
    """Module with its own attention, and a decoder over a second copy of the same weights."""
    if name == "seed":
        own, ours = load("seed"), load("seed")
        own.decoder.release()
        return own.decoder.module, ours.decoder
    config = random_config(name)
    torch.manual_seed(0)
    own = Qwen3ForCausalLM(config).eval()
    ours = Qwen3ForCausalLM(copy.deepcopy(config)).eval()  # Decoder marks the config as its own
    ours.load_state_dict(own.state_dict(), assign=True)
    return own, Decoder(ours)


def text_ids(tokenizer: Any, count: int) -> tuple[int, ...]:
    """Token ids of a conversation, repeated up to `count` tokens."""
    text = " ".join(message.content for message in demo_conversation().messages)
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    return (ids * (count // len(ids) + 1))[:count]
