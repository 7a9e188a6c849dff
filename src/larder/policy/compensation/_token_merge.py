"""Index helpers and weighted means of compensations that merge entries."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int64
from torch import Tensor

from larder.core.observation import Entries
from larder.core.part import LOG_COUNT
from larder.core.plan import Folds, Plan
from larder.core.types import Packed, PackedMask
from larder.ops.packing import heads_of_packed, mask_of, storage_rows, unmasked_indices

Indices = Int64[Tensor, " _"]


def kept_mask(plan: Plan, entries: Entries) -> PackedMask:
    """Mask of the packed entries that stay."""
    return mask_of(plan.kept, sum(entries.lengths))


def rejected_indices(plan: Plan, entries: Entries) -> Indices:
    """Indices of the packed entries that do not stay, ascending."""
    return unmasked_indices(kept_mask(plan, entries))


def unique_targets(targets: Indices) -> tuple[Tensor, Tensor]:
    """Sorted distinct targets, and the index of each target among them."""
    return torch.unique(targets, return_inverse=True)  # pyright: ignore


def heads_of(packed: Indices, entries: Entries) -> Indices:
    """Kv head of each packed entry."""
    return heads_of_packed(packed, entries.lengths)


def rejected_rows(packed: Indices, entries: Entries) -> Indices:
    """Storage rows of packed entries."""
    return storage_rows(packed.cpu(), *entries.layout).to(entries.positions.device)


def mean_folds(weights: Packed, sources: Indices, targets: Indices) -> Folds:
    """Merges that make every target the weighted mean of itself and its sources.

    Args:
        weights: weights of all packed entries, for keys and values alike.
        sources, targets: packed entries; a source has one target and is not a target itself.
    """
    unique, indices = unique_targets(targets)
    totals = weights[unique].index_add(0, indices, weights[sources])
    shares = torch.cat([weights[sources] / totals[indices], weights[unique] / totals])
    return Folds(torch.cat([sources, unique]), torch.cat([targets, unique]), shares, shares)


def merge_by_count(plan: Plan, entries: Entries, sources: Indices, targets: Indices) -> Plan:
    """Plan that merges sources into targets, weighted by the tokens that each represents.

    `LOG_COUNT` of a target becomes the logarithm of the total count.
    """
    if not len(sources):
        return plan
    logs = entries.column(LOG_COUNT)
    counts = logs.exp()
    unique, indices = unique_targets(targets)
    totals = counts[unique].index_add(0, indices, counts[sources])
    logs = logs.index_copy(0, unique, totals.log())[plan.kept]
    columns = {**plan.columns, LOG_COUNT: logs}
    return replace(plan, folds=mean_folds(counts, sources, targets), columns=columns)


def argmax_per_group(values: Packed, groups: Indices, entries: Indices, count: int) -> Indices:
    """Entry with the highest value in each of `count` groups; -1 for groups without any.

    Args:
        values, groups: value and group of all packed entries.
        entries: candidate packed entries, ascending; ties go to the first.
    """
    own, candidates = groups[entries], values[entries]
    best = candidates.new_full((count,), -torch.inf).scatter_reduce(0, own, candidates, "amax")
    top = candidates == best[own]
    none = len(values)
    first = own.new_full((count,), none).scatter_reduce(0, own[top], entries[top], "amin")
    return first.masked_fill(first == none, -1)
