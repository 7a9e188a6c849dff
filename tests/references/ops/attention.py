"""Attention, one number at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def one_query(
    query: list[float],
    keys: list[list[float]],
    values: list[list[float]],
    scaling: float,
    bias: list[float],
) -> tuple[list[float], float]:
    """Softmax-weighted mean of the values, and the log of the sum of exponentials."""
    if not keys:
        return [], -math.inf
    logits = [scaling * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    logits = [logit + added for logit, added in zip(logits, bias, strict=True)]
    peak = max(logits)
    exponentials = [math.exp(logit - peak) for logit in logits]
    total = sum(exponentials)
    out = [0.0] * len(values[0])
    for exponential, value in zip(exponentials, values, strict=True):
        for d, number in enumerate(value):
            out[d] += exponential / total * number
    return out, peak + math.log(total)


def attend(
    queries: Tensor,
    heads: list[tuple[Tensor, Tensor]],
    scaling: float,
    visible: list[list[int]],
    biases: list[list[float]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries [H, Q, D]; query q sees the rows visible[q] of its kv head."""
    biases = biases or [[0.0] * len(keys) for keys, _ in heads]
    num_heads, query_len, head_dim = queries.shape
    group = num_heads // len(heads)
    outs = torch.zeros(num_heads, query_len, head_dim)
    lses = torch.full((num_heads, query_len), -math.inf)
    for h in range(num_heads):
        keys, values = heads[h // group]
        for q in range(query_len):
            seen = [row for row in visible[q] if row < len(keys)]
            out, lse = one_query(
                queries[h, q].double().tolist(),
                [keys[row].double().tolist() for row in seen],
                [values[row].double().tolist() for row in seen],
                scaling,
                [biases[h // group][row] for row in seen],
            )
            if seen:
                outs[h, q] = torch.tensor(out)
                lses[h, q] = lse
    return outs, lses


def ragged(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scaling: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    heads, biases = [], []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        heads.append((keys[start : start + length], values[start : start + length]))
        biases.append([0.0] * length if bias is None else bias[start : start + length].tolist())
    everything = list(range(max(lengths.tolist())))
    return attend(queries, heads, scaling, [everything] * queries.shape[1], biases)


def causal(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    sections: tuple[int, ...],
    window: int | None,
) -> tuple[Tensor, Tensor]:
    visible: list[list[int]] = []
    for section in sections:
        first = len(visible)
        for q in range(section):
            behind = q if window is None else min(q, window - 1)
            visible.append([first + q - back for back in range(behind, -1, -1)])
    return attend(queries, list(zip(keys, values, strict=True)), scaling, visible)


def windowed(
    queries: Tensor,
    first_visible: Tensor,
    keys: Tensor,
    values: Tensor,
    key_positions: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    visible = [
        [s for s, key in enumerate(key_positions.tolist()) if key >= first]
        for first in first_visible.tolist()
    ]
    return attend(queries, list(zip(keys, values, strict=True)), scaling, visible)
