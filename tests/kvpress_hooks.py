"""Presses run by the hooks of kvpress itself, on a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from packaging.version import Version

from builders import runnable
from tiny_models import tiny

# Gemma3 scales and slides, which kvpress knows only under its name for pictures and text.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "mistral")


def runs_hooks() -> bool:
    """True if kvpress can run by itself: later transformers lack what its hooks need."""
    import transformers

    return bool(runnable(["kvpress"])) and Version(transformers.__version__) < Version("5.3")


with_hooks = pytest.mark.skipif(not runs_hooks(), reason="kvpress or its transformers is absent")


def read_by_kvpress(
    architecture: str, press: Any, ids: Sequence[int], attention: str = "sdpa"
) -> tuple[Any, Any]:
    """Model and cache after a press has read a text."""
    from transformers import DynamicCache

    module, cache = tiny(architecture), DynamicCache()
    module.set_attn_implementation(attention)
    with torch.no_grad(), press(module):
        module.model(torch.tensor([list(ids)]), past_key_values=cache)
    return module, cache
