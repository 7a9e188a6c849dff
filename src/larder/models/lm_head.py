"""Language-model head: hidden states to logits, and to numbers of tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from larder.core.errors import ModelError
from larder.policy.providers.base import TokenProvider

# Logits computed at a time: 64 MiB in float32.
LOGITS_CHUNK = 1 << 24


class LMHead:
    """Final head of a model, without its layers.

    Architectures scale and cap logits differently, so the model's own forward is called, on a
    shallow copy whose layers pass their input through. Weights are shared; the model is unchanged.
    """

    def __init__(self, module: Any) -> None:
        self._width = max(1, LOGITS_CHUNK // module.get_output_embeddings().weight.shape[0])
        self._module = copy.copy(module)
        self._module.__dict__.pop("forward", None)  # a wrapper would call the module it wraps
        self._module._modules = dict(module._modules)
        name, layers = base_model_of(module)
        setattr(self._module, name, _PassThrough(layers))

    def logits(self, hidden: Float[Tensor, "N hidden"]) -> Float[Tensor, "N V"]:
        """Float32 logits of the next tokens."""
        logits = self._module(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(hidden.device).float()

    def token_numbers(
        self,
        hidden: Float[Tensor, "N hidden"],
        ids: Int[Tensor, " N"],
        providers: Mapping[str, TokenProvider],
    ) -> dict[str, Float[Tensor, " N"]]:
        """Numbers of each token by provider, given the hidden states of the tokens before them.

        Logits are computed in chunks of `LOGITS_CHUNK` numbers.
        """
        parts: dict[str, list[Tensor]] = {name: [] for name in providers}
        chunks = zip(hidden.split(self._width), ids.split(self._width), strict=True)
        for chunk, own in chunks:
            logits = self.logits(chunk)
            for name, provider in providers.items():
                parts[name].append(provider.measure(logits, own))
        return {name: torch.cat(numbers) for name, numbers in parts.items()}


def base_model_of(module: Any) -> tuple[str, nn.Module]:
    """Attribute name and module of the part below a model's head.

    `base_model` returns the model itself if its class names a part that it does not have, as
    Gemma3's does in transformers 4.54; then the part with the input embeddings is used.

    Raises:
        ModelError: the model has no such part.
    """
    parts = dict(module.named_children())
    table = module.get_input_embeddings()
    holding = [name for name, part in parts.items() if any(m is table for m in part.children())]
    for name in [n for n, part in parts.items() if part is module.base_model] or holding:
        return name, parts[name]
    raise ModelError(
        f"{type(module).__name__} has no base model with the input embeddings, so Larder cannot "
        "run it without its head: choose a model for causal language modeling."
    )


def text_body_of(module: Any) -> nn.Module:
    """Layers of a model without the head; without the vision tower, where it has one.

    Raises:
        ModelError: the model has no such part.
    """
    base = base_model_of(module)[1]
    table = module.get_input_embeddings()
    models = (part for part in base.children() if isinstance(part, PreTrainedModel))
    return next((part for part in models if any(m is table for m in part.children())), base)


@dataclass
class _LastHiddenState(BaseModelOutputWithPast):
    """Output of layers; whatever else a head reads of it, such as logits of a router, is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):  # protocols of Python
            raise AttributeError(name)


class _PassThrough(nn.Module):
    """Replacement of the layers that returns its input, with their attributes, such as scales."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        attributes = {*vars(self), "forward"}
        vars(self).update(
            {name: value for name, value in vars(layers).items() if name not in attributes}
        )

    def forward(
        self, input_ids: None = None, *, inputs_embeds: Tensor, **rest: Any
    ) -> _LastHiddenState:
        return _LastHiddenState(last_hidden_state=inputs_embeds)  # pyright: ignore
