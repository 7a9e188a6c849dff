"""Recorded queries and keys of a model's own attention, and its weights by loops."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from larder.models import Decoder


class Heads:
    """Queries, keys, values and weights of one layer, one query head at a time, as lists."""

    def __init__(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.group = len(queries) // len(keys)
        self.queries, self.keys, self.values = queries, keys, values
        self.scaling = scaling

    def row(self, head: int, token: int, seen: Any = lambda token, other: True) -> list[float]:
        """Weights of a token on all up to itself that it sees."""
        keys = self.keys[head // self.group]
        powers = [
            math.exp(float(self.queries[head, token] @ keys[other]) * self.scaling)
            if seen(token, other)
            else 0.0
            for other in range(token + 1)
        ]
        return [power / sum(powers) for power in powers]

    def out(self, head: int, token: int, seen: Any = lambda token, other: True) -> Tensor:
        row, values = self.row(head, token, seen), self.values[head // self.group]
        return torch.stack([w * values[other] for other, w in enumerate(row)]).sum(0)


def heads_of(decoder: Decoder, ids: tuple[int, ...]) -> list[Heads]:
    """Every layer of a text, by the model's own attention."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layers: list[Heads] = []

    def recorded(module, query, key, value, attention_mask, scaling, **rest):
        layers.append(Heads(query[0], key[0], value[0], scaling))
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)

    AttentionInterface.register("recorded", recorded)
    decoder.module.set_attn_implementation("recorded")
    try:
        with torch.no_grad():
            decoder.module.base_model(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.full((len(ids), len(ids)), -1e9).triu(1)[None, None],
                use_cache=False,
            )
    finally:
        decoder.module.set_attn_implementation("larder")
        del AttentionInterface._global_mapping["recorded"]
    return layers
