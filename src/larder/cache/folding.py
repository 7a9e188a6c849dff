"""Carries out the folds of a plan: entries that become weighted sums of entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.observation import Entries
from larder.core.plan import Plan


@dataclass(frozen=True)
class Folded:
    """What the targets of a plan become.

    Args:
        targets: ascending indices into the packed entries before the plan.
        keys, values: float32.
    """

    targets: Int64[Tensor, " N"]
    keys: Float[Tensor, "N D"]
    values: Float[Tensor, "N D"]


def folded(plan: Plan, entries: Entries) -> Folded:
    """The sums that a plan asks for, computed before anything moves."""
    folds, head_dim = plan.folds, entries.keys.shape[1]
    if not len(folds):
        nothing = entries.keys.new_zeros(0, head_dim, dtype=torch.float32)
        return Folded(folds.targets, nothing, nothing)
    targets, places = torch.unique(folds.targets, return_inverse=True)
    rows = entries.packed_rows()[folds.sources]
    keys = entries.keys[rows].float() * folds.key_weights[:, None]
    values = entries.values[rows].float() * folds.value_weights[:, None]
    sums = keys.new_zeros(2, len(targets), head_dim)
    return Folded(targets, sums[0].index_add(0, places, keys), sums[1].index_add(0, places, values))
