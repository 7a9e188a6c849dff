"""Caches that are filled with random entries, to tell what holding and decoding cost."""

from __future__ import annotations

import torch

from larder.cache.sequence import Form, SequenceCache
from larder.core.ledger import Ledger
from larder.models.decoder import Decoder

NOTHING = Ledger()


def filled(
    decoder: Decoder,
    form: Form,
    entries: int,
    ledger: Ledger = NOTHING,
    spread: float = 1.0,
    context: int | None = None,
) -> SequenceCache:
    """A cache with random entries; ragged heads hold half to one and a half of `entries` each.

    A spread of 0 gives all heads the same. Columns of the ledger hold random numbers, scalars
    nothing yet.

    Args:
        context: true tokens read. The later half of a head's entries are the latest of them, the
            others lie evenly before. Left out, twice the entries, and these are the first.
    """
    spec, state = decoder.spec, dict[str, torch.Tensor]()
    for layer in spec.layers:
        heads, size, name = layer.kv_heads, layer.head_dim, layer.index
        lengths = torch.full((heads,), entries)
        if form is Form.RAGGED:
            reach = round(spread * entries / 2)
            lengths += torch.linspace(-reach, reach, heads).long()
            state[f"{name}.lengths"] = lengths
        total = int(lengths.sum())
        shape = (total, size) if form is Form.RAGGED else (heads, entries, size)
        state[f"{name}.keys"] = torch.randn(shape).to(spec.dtype)
        state[f"{name}.values"] = torch.randn(shape).to(spec.dtype)
        kept = kept_by(form, ledger)
        state |= {f"{name}.column.{column}": torch.rand(total) for column in kept.columns}
        unset = torch.full((heads,), torch.nan)
        state |= {f"{name}.scalar.{scalar}": unset.clone() for scalar in kept.scalars}
        places = [_places(n, context) for n in lengths.tolist()]
        state[f"{name}.positions"] = torch.cat(places if form is Form.RAGGED else places[:1])
    meta = SequenceCache(spec, form, kept_by(form, ledger)).meta()
    meta |= {"next_position": str(context or 2 * entries)}
    cache = SequenceCache.restore(spec, {n: t.to(spec.device) for n, t in state.items()}, meta)
    cache.reserve(64)
    return cache


def kept_by(form: Form, ledger: Ledger) -> Ledger:
    """Only a ragged cache remembers anything."""
    return ledger if form is Form.RAGGED else NOTHING


def _places(entries: int, context: int | None) -> torch.Tensor:
    """True positions of the entries of a head."""
    if context is None:
        return torch.arange(entries, dtype=torch.int32)
    latest = entries // 2
    early = torch.arange(entries - latest) * (context - latest) // max(entries - latest, 1)
    return torch.cat([early, torch.arange(context - latest, context)]).to(torch.int32)
