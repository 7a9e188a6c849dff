"""Entries that become weighted sums of entries, one number at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.cache.loop import Entry

Place = tuple[int, int]  # a head, and an entry of it as it is before the plan


@dataclass(frozen=True)
class Fold:
    """One row: what an entry gives to another, or keeps of itself."""

    source: Place
    target: Place
    key_weight: float
    value_weight: float


def folded(
    heads: Sequence[Sequence[Entry]], chosen: Sequence[Sequence[int]], folds: Sequence[Fold]
) -> list[list[Entry]]:
    """Rows that stay in every head when targets become the sums of their rows."""
    return [
        [_outcome(heads, (head, index), folds) for index in indices]
        for head, indices in enumerate(chosen)
    ]


def _outcome(heads: Sequence[Sequence[Entry]], position: Place, folds: Sequence[Fold]) -> Entry:
    own = heads[position[0]][position[1]]
    rows = [fold for fold in folds if fold.target == position]
    if not rows:
        return own
    key, value = [0.0] * len(own.key), [0.0] * len(own.value)
    for fold in rows:
        given = heads[fold.source[0]][fold.source[1]]
        for d in range(len(key)):
            key[d] += fold.key_weight * float(given.key[d])
            value[d] += fold.value_weight * float(given.value[d])
    return Entry(own.position, _stored(key, own.key), _stored(value, own.value))


def _stored(numbers: list[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype)
