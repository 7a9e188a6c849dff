"""Tensors of learned tokens before training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from larder.models.decoder import Decoder
from larder.policy.providers._soft_tokens import DOWN, EMBEDDINGS, UP


def first_soft_tokens(
    decoder: Decoder, count: int, rank: int, source: torch.Generator
) -> list[dict[str, Tensor]]:
    """Embeddings of `count` random tokens, and updates that change nothing, by managed layer."""
    table = decoder.embedding_table().detach()
    drawn = torch.randint(len(table), (count,), generator=source)
    layers = list[dict[str, Tensor]]()
    for linears in decoder.soft_prompts.modules.linears:
        own = dict[str, Tensor]()
        for name, linear in linears.items():
            bound = 1 / math.sqrt(linear.in_features)
            down = (2 * torch.rand(rank, linear.in_features, generator=source) - 1) * bound
            own |= {f"{name}{DOWN}": down, f"{name}{UP}": torch.zeros(linear.out_features, rank)}
        layers.append({name: each.to(table.device) for name, each in own.items()})
    layers[0][EMBEDDINGS] = table[drawn.to(table.device)].float().clone()
    return layers
