"""Switch of a model's attention implementation."""

from __future__ import annotations

from typing import Any

from larder.core.errors import ModelError
from larder.models.attention_backend import text_implementation
from larder.models.recurrent import recurrent_layers


def switch_attention(module: Any, name: str) -> None:
    """Set the attention implementation, and check that it is in effect.

    Raises:
        ModelError: the architecture does not dispatch attention through transformers' interface.
    """
    if not _supports_backend(type(module)) and not recurrent_layers(module.config):
        raise ModelError(
            f"{type(module).__name__} does not use transformers' AttentionInterface, so Larder "
            "cannot manage its cache: choose an architecture that does (Llama, Qwen, Mistral, "
            "Phi3, Gemma3, ...)."
        )
    module.set_attn_implementation(text_implementation(module.config, name))
    if module.config.get_text_config()._attn_implementation != name:
        raise ModelError(f"{type(module).__name__} refused the attention implementation {name!r}.")


def _supports_backend(kind: type) -> bool:
    """True if the class declares that it dispatches attention through the public interface."""
    return bool(kind._supports_attention_backend)  # pyright: ignore
