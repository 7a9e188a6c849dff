"""Attention over cached entries, one query, one head, one entry at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from larder.core import LayerSpec
from references.ops.softmax import NO_SINK, capped, shares, sink_of


@dataclass(frozen=True)
class Entry:
    position: int
    key: Tensor
    value: Tensor


def attend_one(
    query: Tensor,
    entries: Sequence[Entry],
    scaling: float,
    softcap: float | None = None,
    sink: float = NO_SINK,
) -> Tensor:
    """One query's attention to the entries, in float64; nothing seen gives zeros."""
    asked = query.tolist()
    logits: list[float] = []
    for entry in entries:
        logit = sum(q * k for q, k in zip(asked, entry.key.tolist(), strict=True))
        logits.append(capped(logit * scaling, softcap))
    out = [0.0] * len(asked)
    weights = shares(logits, sink) if logits else []
    for weight, entry in zip(weights, entries, strict=True):
        for d, number in enumerate(entry.value.tolist()):
            out[d] += weight * number
    return torch.tensor(out, dtype=torch.float64)


def sees(layer: LayerSpec, query: int, key: int) -> bool:
    """True if the window or chunk of a query at one position holds a key at another."""
    if layer.chunk is not None:
        return query // layer.chunk == key // layer.chunk
    return layer.sliding_window is None or query - key < layer.sliding_window


def attend(
    heads: Sequence[Sequence[Entry]],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    sections: tuple[int, ...],
    layer: LayerSpec,
) -> Tensor:
    """New tokens see the cache of their kv head, and their own section up to themselves."""
    group = queries.shape[0] // keys.shape[0]
    out = torch.zeros(queries.shape, dtype=torch.float64)
    for head in range(queries.shape[0]):
        first = 0
        for section in sections:
            for q in range(first, first + section):
                at, kv = int(positions[q]), head // group
                own = [
                    Entry(int(positions[s]), keys[kv, s], values[kv, s])
                    for s in range(first, q + 1)
                ]
                seen = [e for e in (*heads[kv], *own) if sees(layer, at, e.position)]
                numbers = layer.scaling, layer.softcap, sink_of(layer.sinks, head)
                out[head, q] = attend_one(queries[head, q], seen, *numbers)
            first += section
    return out
