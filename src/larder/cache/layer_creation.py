"""Layers of a cache: which form holds a layer of a model."""

from __future__ import annotations

from larder.cache.forms.base import CacheLayer
from larder.cache.spec import FORMS, CacheSpec
from larder.core.spec import LayerSpec, ModelSpec


def form_of(spec: CacheSpec) -> type[CacheLayer]:
    """Class of the form of a cache."""
    return FORMS.load(spec.form)


def create_layer(layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> CacheLayer:
    """Empty layer: of the specified form, a sliding window, or one that shares entries."""
    kind: type[CacheLayer]
    if layer.kv_source is not None:
        kind = FORMS.load("shared_kv")
    elif layer.sliding_window is not None:
        kind = FORMS.load("window")
    else:
        kind = form_of(spec)
        if kind.can_page and model.arena is not None and _can_page(layer, spec):
            kind = FORMS.load("paged")
    return kind.create(layer, model, spec)


def _can_page(layer: LayerSpec, spec: CacheSpec) -> bool:
    """True if a plain layer needs nothing beside keys, values and positions."""
    ledger = spec.ledger
    has_more = ledger.columns or ledger.scalars or spec.codecs or spec.transform is not None
    return not has_more and not layer.latent_rank
