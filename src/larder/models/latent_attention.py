"""Multi-head latent attention (MLA) over cached latents, in absorbed form.

    latent   normalized low-rank input of keys and values      [rank]     the same for all heads
    rotated  part of the keys that RoPE rotates                [rope]     the same for all heads
    entry    latent | rotated                                             one kv head, held once

The model expands a latent to the keys and values of every head, by `kv_b_proj`. Attention to the
expanded entries is attention to the latents themselves if the projection of the keys is applied to
the queries, and that of the values to the output. Values are then the first `rank` channels of the
entries.

DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model"
(2024), arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from larder.core.errors import ModelError
from larder.core.types import Queries
from larder.models.attention_backend import CONTEXT_KEYWORD, AttentionInputs, LayerAttention

PAST_KEYWORD = "past_key_values"


class LatentAttention:
    """Attention of one call of an MLA module, by a layer attention over its latents.

    The module takes it for its cache too: the latents are what it would cache.

    Args:
        module: attention module of the model.
        inner: attention of the forward batch.
    """

    def __init__(self, module: nn.Module, inner: LayerAttention) -> None:
        self._module, self._inner = module, inner
        self._entries: list[Tensor] = []

    def update(
        self, latents: Tensor, rotated: Tensor, layer: int, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Record the latents of the new tokens, as a cache of transformers would."""
        self._entries = [latents, rotated]
        return latents, rotated

    def attend(self, inputs: AttentionInputs) -> Queries:
        """Attention output [H, Q, Dv] from expanded queries, keys and values.

        A module that caches expanded keys and values is passed through.
        """
        if [part.shape[1] for part in self._entries] != [1, 1]:
            return self._inner.attend(inputs)
        latents, rotated = self._entries
        rank, plain = latents.shape[-1], inputs.queries.shape[-1] - rotated.shape[-1]
        projections = _head_projections(self._module, inputs.keys.shape[0], latents)
        of_keys, of_values = projections[:, :plain], projections[:, plain:]
        queries = torch.cat(
            [inputs.queries[..., :plain] @ of_keys, inputs.queries[..., plain:]], dim=-1
        )
        rows = torch.cat([latents, rotated.to(latents.dtype)], dim=-1)[0]  # [1, Q, rank + rope]
        absorbed = replace(inputs, queries=queries, keys=rows, values=rows, latent_rank=rank)
        out = self._inner.attend(absorbed)
        return out[..., :rank] @ of_values.mT


def _head_projections(
    module: Any, heads: int, latents: Float[Tensor, "1 1 Q rank"]
) -> Float[Tensor, "H P rank"]:
    """Rows of `kv_b_proj` by head: those of the keys, then those of the values."""
    from larder.ops.linear_weight import linear_weight

    weight = linear_weight(module.kv_b_proj, latents[0, 0])
    return weight.reshape(heads, -1, latents.shape[-1])


def is_latent_attention(module: Any) -> bool:
    """True for an attention module that caches latents and expands them without a bias.

    Raises:
        ModelError: an indexer of the model selects the tokens that a query attends to.
    """
    children = dict(module.named_children())
    projection = children.get("kv_b_proj")
    if projection is not None and "indexer" in children:
        raise ModelError(
            f"{type(module).__name__} attends to tokens that an indexer of the model selects, "
            "which Larder does not support: choose a model without one, such as DeepSeek-V3."
        )
    if projection is None or "expand_kv" not in dir(type(module)):
        return False
    return not any(name.endswith("bias") for name, _ in projection.named_parameters())


def absorb_latents(
    module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of an MLA module: its calls by Larder run over latents."""
    inner = named.get(CONTEXT_KEYWORD)
    if inner is None or isinstance(inner, LatentAttention):
        return None
    attention = LatentAttention(module, inner)
    return args, {**named, CONTEXT_KEYWORD: attention, PAST_KEYWORD: attention}


def hook_latent_attention(model: nn.Module) -> list[Any]:
    """Install `absorb_latents` on all MLA modules of a model; handles to remove it.

    Raises:
        ModelError: as `is_latent_attention`.
    """
    found = [module for module in model.modules() if is_latent_attention(module)]
    return [module.register_forward_pre_hook(absorb_latents, with_kwargs=True) for module in found]
