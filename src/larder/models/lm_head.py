"""What follows the layers of a model: from hidden states to logits, and to surprise."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from larder.core.errors import ModelError

# Logits computed at a time: 64 MiB in float32.
LOGITS_CHUNK = 1 << 24


class LMHead:
    """A model's own way from hidden states to logits.

    Architectures scale and cap their logits in ways of their own, so the model's own forward is
    called, on a shallow copy whose layers hand on what they are given. Weights are shared, and the
    model is not touched.
    """

    def __init__(self, module: Any) -> None:
        self._width = max(1, LOGITS_CHUNK // module.get_output_embeddings().weight.shape[0])
        self._module = copy.copy(module)
        self._module.__dict__.pop("forward", None)  # a wrapper would call the module it wraps
        self._module._modules = dict(module._modules)
        setattr(self._module, base_model_of(module)[0], _PassThrough())

    def logits(self, hidden: Float[Tensor, "N hidden"]) -> Float[Tensor, "N V"]:
        """Float32 logits of the tokens that follow."""
        return self._module(inputs_embeds=hidden[None], use_cache=False).logits[0].float()

    def surprises(
        self, hidden: Float[Tensor, "N hidden"], ids: Int[Tensor, " N"]
    ) -> Float[Tensor, " N"]:
        """-log p of each token, given the hidden state of the one before it.

        Logits of some of them are held at a time.
        """
        parts = zip(hidden.split(self._width), ids.split(self._width), strict=True)
        return torch.cat([self._chunk_surprises(part, own) for part, own in parts])

    def _chunk_surprises(
        self, hidden: Float[Tensor, "N hidden"], ids: Int[Tensor, " N"]
    ) -> Float[Tensor, " N"]:
        logits = self.logits(hidden)
        return logits.logsumexp(-1) - logits.gather(1, ids[:, None])[:, 0]


def base_model_of(module: Any) -> tuple[str, nn.Module]:
    """What is below a model's head, and the name that the model has for it.

    `base_model` is the model itself where its class names a part that it does not have, as Gemma3's
    does in transformers 4.54; then it is the part with the input embeddings.

    Raises:
        ModelError: the model has no such part.
    """
    parts = dict(module.named_children())
    table = module.get_input_embeddings()
    holding = [name for name, part in parts.items() if any(m is table for m in part.children())]
    for name in [n for n, part in parts.items() if part is module.base_model] or holding:
        return name, parts[name]
    raise ModelError(
        f"{type(module).__name__} does not say which of its parts holds its layers, so Larder "
        "cannot read without its head: take a model for causal language modeling."
    )


class _PassThrough(nn.Module):
    """Stands where the layers were."""

    def forward(self, inputs_embeds: Tensor, **rest: Any) -> BaseModelOutputWithPast:
        del rest
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)  # pyright: ignore
