"""LESS one query, head and entry at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from larder.cache import LowRankMaps, NewTokens
from larder.core import LayerSpec
from references.cache.folding import Fold
from references.cache.loop import Entry
from references.cache.ragged import RaggedLoop


class LowRankLoop(RaggedLoop):
    """A list of entries per head, and a list of those that were rejected."""

    def __init__(self, layer: LayerSpec, maps: LowRankMaps) -> None:
        super().__init__(layer)
        self.maps = maps
        self.gone: list[list[Entry]] = [[] for _ in range(layer.kv_heads)]

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        for head, own in enumerate(chosen):
            self.gone[head] += [e for n, e in enumerate(self.heads[head]) if n not in own]
        super().keep(chosen)

    def fold(self, chosen: Sequence[Sequence[int]], folds: Sequence[Fold]) -> None:
        merged = {fold.source for fold in folds}
        for head, own in enumerate(chosen):
            entries = enumerate(self.heads[head])
            self.gone[head] += [e for n, e in entries if n not in own and (head, n) not in merged]
        super().fold(chosen, folds)

    def attend(self, new: NewTokens) -> Tensor:
        queries, keys, values = new.queries, new.keys, new.values
        out = torch.zeros(queries.shape, dtype=torch.float64)
        group = self.layer.group
        for head in range(len(queries)):
            kv, first = head // group, 0
            for section in new.section_lengths:
                for q in range(first, first + section):
                    own = [Entry(0, keys[kv, s], values[kv, s]) for s in range(first, q + 1)]
                    seen = [*self.heads[kv], *own]
                    out[head, q] = self.attend_one(head, queries[head, q], seen)
                first += section
        return out

    def attend_one(self, head: int, query: Tensor, seen: Sequence[Entry]) -> Tensor:
        """(sparse numerator + phi(q) H) / (sparse denominator + phi(q) z)."""
        kv = head // self.layer.group
        above, below = torch.zeros(len(query), dtype=torch.float64), 0.0
        for entry in seen:
            weight = math.exp(self.layer.scaling * dot(query, entry.key))
            above, below = above + weight * entry.value.double(), below + weight
        phi = query_features(self.maps, head, query)
        for entry in self.gone[kv]:
            psi = key_features(self.maps, kv, entry.key)
            weight = sum(a * b for a, b in zip(phi, psi, strict=True))
            above, below = above + weight * entry.value.double(), below + weight
        return above / below


def dot(left: Tensor, right: Tensor) -> float:
    return sum(a * b for a, b in zip(left.tolist(), right.tolist(), strict=True))


def gelu(number: float) -> float:
    return number * (1 + math.erf(number / math.sqrt(2))) / 2


def perceptron(given: Sequence[float], hidden: Tensor, outer: Tensor) -> list[float]:
    inner = [
        gelu(sum(x * float(hidden[d, i]) for d, x in enumerate(given)))
        for i in range(hidden.shape[1])
    ]
    return [
        gelu(sum(x * float(outer[i, r]) for i, x in enumerate(inner)))
        for r in range(outer.shape[1])
    ]


def query_features(maps: LowRankMaps, head: int, query: Tensor) -> list[float]:
    found = perceptron(query.tolist(), maps.query_hidden[head], maps.query_outer[head])
    return [abs(number) for number in found]


def key_features(maps: LowRankMaps, head: int, key: Tensor) -> list[float]:
    found = perceptron(key.tolist(), maps.key_hidden[head], maps.key_outer[head])
    scaled = [
        abs(float(s)) * x for s, x in zip(maps.key_scale[head, 0].tolist(), found, strict=True)
    ]
    mixing = maps.interaction[head].tolist()
    return [
        abs(x + sum(scaled[s] * mixing[s][r] for s in range(len(scaled))))
        for r, x in enumerate(scaled)
    ]
