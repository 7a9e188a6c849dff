"""What compensations that merge have in common: who was rejected, and means over what is merged."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int64
from torch import Tensor

from larder.core.ledger import LOG_COUNT
from larder.core.observation import Entries
from larder.core.plan import Folds, Plan
from larder.core.types import Packed, PackedMask
from larder.ops.packing import heads_of_packed, mask_of, storage_rows, unmasked_indices

Indices = Int64[Tensor, " _"]


def kept_mask(plan: Plan, entries: Entries) -> PackedMask:
    """Which packed entries stay."""
    return mask_of(plan.kept, sum(entries.lengths))


def rejected_indices(plan: Plan, entries: Entries) -> Indices:
    """The packed entries that do not stay, ascending."""
    return unmasked_indices(kept_mask(plan, entries))


def unique_targets(targets: Indices) -> tuple[Tensor, Tensor]:
    """Every target once, ascending, and where among them each stands."""
    return torch.unique(targets, return_inverse=True)  # pyright: ignore


def heads_of(packed: Indices, entries: Entries) -> Indices:
    """The kv head of each packed entry."""
    return heads_of_packed(packed, entries.lengths)


def rejected_rows(packed: Indices, entries: Entries) -> Indices:
    """Where in the storage packed entries lie."""
    return storage_rows(packed.cpu(), *entries.layout).to(entries.positions.device)


def mean_folds(weights: Packed, sources: Indices, targets: Indices) -> Folds:
    """Every target becomes the mean of itself and its sources.

    Args:
        weights: of all packed entries, in any unit; keys and values weigh the same.
        sources, targets: packed entries; a source has one target and is none itself.
    """
    own, places = unique_targets(targets)
    totals = weights[own].index_add(0, places, weights[sources])
    shares = torch.cat([weights[sources] / totals[places], weights[own] / totals])
    return Folds(torch.cat([sources, own]), torch.cat([targets, own]), shares, shares)


def merge_by_count(plan: Plan, entries: Entries, sources: Indices, targets: Indices) -> Plan:
    """Sources merged into their targets, each weighing as many tokens as it stands for.

    What results stands for all of them: that is what `LOG_COUNT` of the kept says afterwards.
    """
    if not len(sources):
        return plan
    logs = entries.column(LOG_COUNT)
    counts = logs.exp()
    own, places = unique_targets(targets)
    totals = counts[own].index_add(0, places, counts[sources])
    logs = logs.index_copy(0, own, totals.log())[plan.kept]
    columns = {**plan.columns, LOG_COUNT: logs}
    return replace(plan, folds=mean_folds(counts, sources, targets), columns=columns)


def argmax_per_group(values: Packed, groups: Indices, found: Indices, count: int) -> Indices:
    """The highest-valued of the found entries in each of `count` groups; -1 where none is found.

    Args:
        values, groups: of all packed entries.
        found: packed entries, ascending; of equals the first is taken.
    """
    own, held = groups[found], values[found]
    best = held.new_full((count,), -torch.inf).scatter_reduce(0, own, held, "amax")
    top = held == best[own]
    none = len(values)
    first = own.new_full((count,), none).scatter_reduce(0, own[top], found[top], "amin")
    return first.masked_fill(first == none, -1)
