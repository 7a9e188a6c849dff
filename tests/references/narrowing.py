"""Narrowed prefill, slowly: the model on its own, where layers see what reached them.

A token that does not go into a layer is seen there by no other token. What the layer computes of it
is computed all the same, and nobody looks at it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def go_on(heads: Sequence[Sequence[float]], always: Sequence[bool], count: int) -> list[int]:
    """Indices of the tokens that go on: those that always do, then by their scores of all heads."""
    totals = [sum(head[token] for head in heads) for token in range(len(always))]
    totals = [math.inf if stays else own for own, stays in zip(totals, always, strict=True)]
    order = sorted(range(len(totals)), key=lambda token: (-totals[token], token))
    return sorted(order[: max(count, sum(always))])


def layer_lengths(tokens: int, layers: int, share: float, recents: int, least: int) -> list[int]:
    """Tokens that reach each layer of PyramidInfer."""
    found = [tokens]
    for layer in range(layers - 1):
        falling = (math.cos(math.pi * layer / layers) + 1) / 2
        own = share + (1 - share) * falling
        context = found[-1] - recents
        kept = math.floor(context * own + 1e-9)
        found.append(max(kept, min(least, context)) + recents)
    return found


def narrowed_logits(
    module: Any, ids: Sequence[int], reached: Mapping[int, set[int]], read: int
) -> Tensor:
    """Logits of all tokens, where of the first `read` only some reach a layer.

    Args:
        reached: positions that reach each layer, by its number; layers left out get all.
    """
    from transformers import AttentionInterface

    def attend(module, query, key, value, attention_mask, scaling, sliding_window=None, **rest):
        del attention_mask, rest
        group, there = query.shape[1] // key.shape[1], reached.get(module.layer_idx)
        out = torch.zeros_like(query)
        for head in range(query.shape[1]):
            for token in range(query.shape[2]):
                seen = [
                    other
                    for other in range(token + 1)
                    if there is None or other in there or other >= read or other == token
                ]
                if sliding_window is not None:
                    seen = [other for other in seen if other > token - sliding_window]
                weights = (key[0, head // group, seen] @ query[0, head, token] * scaling).softmax(0)
                out[0, head, token] = weights @ value[0, head // group, seen]
        return out.transpose(1, 2), None

    former = module.config._attn_implementation
    AttentionInterface.register("narrowed", attend)
    module.set_attn_implementation("narrowed")
    try:
        with torch.no_grad():
            return module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    finally:
        module.set_attn_implementation(former)
        del AttentionInterface._global_mapping["narrowed"]
