"""Random features of keys and queries, saved where caches of a model find them."""

from __future__ import annotations

import torch

from larder.cache import LowRankMaps, tables_path
from larder.core import LayerSpec, ModelSpec
from larder.models import Card, LearnedWeights

INNER = 5


def some_maps(layer: LayerSpec, seed: int = 0) -> LowRankMaps:
    """Maps in which every tensor matters."""
    source = torch.Generator().manual_seed(100 * seed + layer.index)
    shapes = LowRankMaps.shapes(layer, INNER)
    return LowRankMaps(
        **{name: torch.randn(shape, generator=source) / 2 for name, shape in shapes.items()}
    )


def silent_maps(layer: LayerSpec) -> LowRankMaps:
    """Saved maps of a single layer, under which rejected entries have no weight."""
    path = tables_path("", "less")
    if not path.is_file():
        maps = some_maps(layer)
        maps.key_scale.zero_()
        LearnedWeights(Card("less", ("",)), (maps.tensors(),)).save(path)
    return LowRankMaps.load(layer, 0, "")


def give_maps(spec: ModelSpec, seed: int = 0) -> None:
    """Save random maps of every managed layer."""
    layers = tuple(some_maps(layer, seed).tensors() for layer in spec.managed)
    card = Card("less", (spec.fingerprint,))
    LearnedWeights(card, layers).save(tables_path(spec.fingerprint, "less"))
