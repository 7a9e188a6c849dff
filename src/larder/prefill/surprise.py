"""Writes down how surprising tokens were, for policies that judge by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.ledger import SURPRISE
from larder.models.forward_batch import LayerActivations, Observer


def record_surprise(
    cache: SequenceCache, layer: int, start: int, surprises: Float[Tensor, " _"]
) -> None:
    """Write it into the entries of one layer.

    Args:
        start: true position of the first token that `surprises` speaks of.
    """
    entries = cache.entries(layer)
    places = entries.positions.long() - start
    is_new = (places >= 0) & (places < len(surprises))
    fresh = surprises[places.clamp(0, len(surprises) - 1)]
    cache.note(layer, {SURPRISE: torch.where(is_new, fresh, entries.columns[SURPRISE])})


def surprise_observer(
    observer: Observer,
    caches: Sequence[SequenceCache],
    layers: Sequence[int],
    surprises: Sequence[Float[Tensor, " _"]],
) -> Observer:
    """An observer that knows of each layer's new entries how surprising they are.

    Args:
        layers: those that remember it.
        surprises: of the tokens that are about to be read, one tensor per row.
    """
    starts = [cache.next_position for cache in caches]

    def watch(row: int, layer: int, recorded: LayerActivations) -> None:
        if layer in layers:
            record_surprise(caches[row], layer, starts[row], surprises[row])
        observer(row, layer, recorded)

    return watch
