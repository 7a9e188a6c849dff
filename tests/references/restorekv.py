"""`restorekv`: what the learned tokens are in each head stands behind what is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from larder.core import Entries, LayerScores
from references.outcome import Entry, Outcome, untouched

TOKENS = 8


def learned_entries(heads: int, head_dim: int) -> dict[str, Tensor]:
    """Entries that a layer is given."""
    source = torch.Generator().manual_seed(8)
    return {
        f"restorekv.{side}": torch.randn(heads, TOKENS, head_dim, generator=source)
        for side in ("keys", "values")
    }


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
    del part
    outcome = untouched(entries, kept)
    is_whole = all(len(own) == count for own, count in zip(kept, entries.lengths, strict=True))
    if scored.phase.value == "generating" or is_whole:
        return outcome
    last = max(int(entries.head_positions(h)[-1]) for h in range(len(kept)))
    keys, values = (scored.learned[f"restorekv.{side}"] for side in ("keys", "values"))
    outcome.added = [
        [Entry(last, keys[head, n].tolist(), values[head, n].tolist()) for n in range(TOKENS)]
        for head in range(len(kept))
    ]
    return outcome
