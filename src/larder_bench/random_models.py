"""Models by name, and real model shapes with random weights, for measurements of cost.

`random:qwen3-0.6b` has the shape of Qwen3-0.6B and the tokenizer of the bundled model: its output
is meaningless, its cost in bytes and seconds is real.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from larder.core import UnknownName, unknown_name_message
from larder.models import LoadedModel, load, move_to_device, seed_tokenizer, torch_dtype, wrap_model

RANDOM = "random:"
_SHAPES: Mapping[str, Mapping[str, int]] = {
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-tiny": {
        "vocab_size": 16384,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
}


def open_model(name: str, device: str = "cpu", dtype: str | None = None) -> LoadedModel:
    """Model of a name as `models.loading.load` takes it, or a model shape with random weights.

    Raises:
        UnknownName: the shape does not exist.
        ModelError: the model cannot be loaded, or its device or dtype cannot be used.
    """
    if not name.startswith(RANDOM):
        return load(name, device, dtype)
    config = random_config(name.removeprefix(RANDOM))
    module = move_to_device(_random(config).to(torch_dtype(dtype, device)), device)
    return LoadedModel(wrap_model(module), seed_tokenizer(), name)


def random_config(shape: str) -> Any:
    """Configuration of a real model's shape.

    Raises:
        UnknownName: the shape does not exist.
    """
    from transformers import Qwen3Config

    if shape not in _SHAPES:
        raise UnknownName(unknown_name_message("shape of a model", shape, sorted(_SHAPES)))
    common: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": 40960}
    return Qwen3Config(**_SHAPES[shape], **common)


def _random(config: Any) -> Any:
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).eval()
