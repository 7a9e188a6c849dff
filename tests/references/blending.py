"""CacheBlend on a Llama, layer by layer and token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Held = list[tuple[Tensor, Tensor] | None]  # by token: un-rotated key and value [K, D]; None if new


def turned(vector: Tensor, position: int, radians: Sequence[float]) -> Tensor:
    """[heads, D] at its position."""
    out, half = vector.clone(), len(radians)
    for pair, radian in enumerate(radians):
        cosine, sine = math.cos(position * radian), math.sin(position * radian)
        one, other = vector[:, pair], vector[:, pair + half]
        out[:, pair], out[:, pair + half] = one * cosine - other * sine, other * cosine + one * sine
    return out


def blended(
    module: Any,
    ids: Sequence[int],
    held: Sequence[Held],
    share: float,
    choice: int = 1,
    num_exact: int = 0,
    given: Sequence[int] | None = None,
):
    """Keys (rotated), values by layer and token, and the tokens that went through all layers.

    Args:
        held: by layer.
        num_exact: first tokens, which are held and never chosen.
        given: tokens that go through all layers, in place of a choice.
    """
    size, radians = module.config.head_dim, module.model.rotary_emb.inv_freq.tolist()
    states = {n: module.model.embed_tokens.weight[token] for n, token in enumerate(ids)}
    chosen, found = list(range(len(ids))), []
    if given is not None:
        chosen = sorted(given)
        states, choice = {n: states[n] for n in chosen}, -1
    for index, layer in enumerate(module.model.layers):
        attention = layer.self_attn
        rows: list[Any] = [None] * len(ids)
        for n in range(len(ids)):
            if n in states:
                normed = layer.input_layernorm(states[n])
                rows[n] = [p(normed).view(-1, size) for p in (attention.k_proj, attention.v_proj)]
            else:
                rows[n] = held[index][n]
        if index == choice:
            away = {
                n: float((rows[n][1] - held[index][n][1]).square().sum())
                for n in range(len(ids))
                if held[index][n] is not None and n >= num_exact
            }
            most = sorted(away, key=lambda n: -away[n])[: math.ceil(share * len(away))]
            news = [n for n in range(len(ids)) if held[index][n] is None]
            chosen = sorted({*most, *news, len(ids) - 1})
            states = {n: states[n] for n in chosen}
        keys = [turned(rows[n][0], n, radians) for n in range(len(ids))]
        found.append((keys, [rows[n][1] for n in range(len(ids))]))
        for n in chosen:
            query = attention.q_proj(layer.input_layernorm(states[n])).view(-1, size)
            query = turned(query, n, radians)
            outs = []
            for head in range(len(query)):
                own = head // (len(query) // len(keys[0]))
                logits = [float(query[head] @ keys[m][own]) / math.sqrt(size) for m in range(n + 1)]
                weights = torch.tensor(logits).softmax(0)
                outs.append(sum(w * rows[m][1][own] for m, w in enumerate(weights)))
            after = states[n] + attention.o_proj(torch.cat(outs))
            states[n] = after + layer.mlp(layer.post_attention_layernorm(after))
    return found, chosen
