"""Entry merging: the folds of a plan, weighted sums that replace their target entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.types import empty_tensor
from larder.ops.packing import are_in_range, is_in_sorted

EntryReader = Callable[[Int64[Tensor, " N"]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MergedEntries:
    """Merged keys and values of the targets of a plan.

    Args:
        targets: ascending indices into the packed entries before the plan.
        keys, values: float32.
    """

    targets: Int64[Tensor, " N"]
    keys: Float[Tensor, "N D"]
    values: Float[Tensor, "N Dv"]

    def among(self, indices: Int64[Tensor, " M"]) -> MergedEntries:
        """Merges whose targets are in `indices`, which ascend."""
        chosen = is_in_sorted(self.targets, indices.to(self.targets.device))
        return MergedEntries(self.targets[chosen], self.keys[chosen], self.values[chosen])


def merge_entries(plan: Plan, entries: Entries) -> MergedEntries:
    """Merged entries of a plan, computed before anything moves.

    Raises:
        CacheError: a source is no entry, or a target is not kept.
    """
    folds = plan.folds
    if not len(folds):
        return no_merges(entries.keys)
    from larder.ops.entry_merge import weighted_sums  # few policies merge

    check_sources(plan, sum(entries.lengths))
    starts, lengths = entries.layout
    targets, keys, values = weighted_sums(
        entries.keys,
        entries.values,
        starts,
        lengths,
        folds.sources,
        folds.targets,
        key_weights=folds.key_weights,
        value_weights=folds.value_weights,
    )
    check_targets(plan, targets)
    return MergedEntries(targets, keys, values)


def merge_by_index(
    plan: Plan, order: Int64[Tensor, " T"], numbers: EntryReader, device: torch.device
) -> MergedEntries:
    """Merged entries of a layer with several storages, by index (see `TierOrder`, `PairedOrder`).

    Args:
        order: the index of each packed entry, in host memory; `targets` are indices as well.
        numbers: reads keys and values at some indices, each index once.

    Raises:
        CacheError: a source is no entry, or a target is not kept.
    """
    from larder.ops.entry_merge import weighted_sums

    check_folds(plan, len(order))
    folds = plan.folds
    sources, rows = torch.unique(order[folds.sources.cpu()], return_inverse=True)
    targets = order[folds.targets.cpu()].to(device)
    keys, values = numbers(sources)
    merged, key_sums, value_sums = weighted_sums(
        keys,
        values,
        starts=torch.tensor([0]),
        lengths=torch.tensor([len(sources)]),
        sources=rows.to(device),
        targets=targets,
        key_weights=folds.key_weights,
        value_weights=folds.value_weights,
    )
    return MergedEntries(merged, key_sums, value_sums)


def no_merges(keys: Float[Tensor, "C D"]) -> MergedEntries:
    """Empty result of a plan without folds."""
    none = empty_tensor(torch.float32, 0, keys.shape[1]).to(keys.device)
    return MergedEntries(empty_tensor(torch.int64, 0).to(keys.device), none, none)


def check_folds(plan: Plan, num_entries: int) -> None:
    """Check that sources are among `num_entries` entries and targets among the kept ones.

    Raises:
        CacheError: they are not.
    """
    check_sources(plan, num_entries)
    check_targets(plan, plan.folds.targets)


def check_sources(plan: Plan, num_entries: int) -> None:
    """Check that fold sources are among `num_entries` entries.

    Raises:
        CacheError: they are not.
    """
    sources = plan.folds.sources
    if not are_in_range(sources, num_entries):
        raise CacheError(
            f"Sources of merges must be among the {num_entries} packed entries, but they lie in "
            f"[{int(sources.min())}, {int(sources.max())}]: count them as they are before the plan."
        )


def check_targets(plan: Plan, targets: Int64[Tensor, " N"]) -> None:
    """Check that fold targets are kept.

    Raises:
        CacheError: they are not.
    """
    found = is_in_sorted(targets, plan.kept.to(targets.device))
    if not bool(found.all()):
        raise CacheError(
            f"Entry {int(targets[~found][0])} is a merge target, but the plan does not keep it: "
            "keep it, or merge into a kept entry."
        )
