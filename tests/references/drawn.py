"""`drawn`: the best, then entries whose logit plus noise is highest."""

from __future__ import annotations

import math
from typing import Any

import torch

from references.choosing_loop import best
from references.uniform import Layers, Measures, layer_tokens

SMALL = {"share": 0.5, "seed": 3}  # parameters for small layers

__all__ = ["choose", "layer_tokens"]


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    out = {}
    for index, heads in layers.items():
        out[index] = []
        for head, entries in enumerate(heads):
            quota = quotas[index]
            sure = best(entries, quota - int(part.share * quota))
            source = torch.Generator().manual_seed((part.seed * 1_000_003 + index) * 1_009 + head)
            chances = torch.rand(len(entries), generator=source).tolist()
            noisy = [
                (score - math.log(-math.log(chance)), shield or position in sure)
                for position, ((score, shield), chance) in enumerate(
                    zip(entries, chances, strict=True)
                )
            ]
            out[index].append(best(noisy, quota))
    return out
