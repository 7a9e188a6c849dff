"""Scorer by a press of NVIDIA/kvpress: 1 for the entries that it keeps, 0 for the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.interop.adapted_press import AdaptedPress
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True, eq=False)
class PressScorer(Scorer):
    """Choice of a press, for the budget `press_budget`.

    A press is asked about a first text, which it sees whole, as under kvpress. All entries of later
    texts score 1.
    """

    press: AdaptedPress

    def required_providers(self) -> frozenset[str]:
        return frozenset({"states"})

    def observes_whole_text(self) -> bool:
        return True

    def score(self, seen: Observation) -> Packed:
        entries, heads = seen.entries, range(seen.layer.kv_heads)
        if set(entries.lengths) != {seen.queries.shape[1]}:
            return torch.ones(sum(entries.lengths), device=entries.keys.device)
        keys = torch.stack([entries.head_keys(head) for head in heads])
        values = torch.stack([entries.head_values(head) for head in heads])
        kept = self.press.kept(seen.layer.index, seen.inputs["states"], keys, values)
        return kept.float().flatten()
