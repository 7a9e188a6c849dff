"""`projection`: the part of the output projection that each query head's channels go through."""

from __future__ import annotations

from typing import Any


def tensor(attention: Any, query_heads: int, head_dim: int) -> list[list[list[float]]]:
    """[H][D][hidden], from a weight of one row per output and a column per channel of all heads."""
    weight = attention.o_proj.weight.tolist()
    return [
        [[row[head * head_dim + channel] for row in weight] for channel in range(head_dim)]
        for head in range(query_heads)
    ]
