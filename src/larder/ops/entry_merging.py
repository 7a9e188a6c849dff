"""Entries that become weighted sums of entries: thresholds, weights and sums.

All in float32 and in the order of the sources. The readable forms are here; the fast ones, for host
memory, are in `larder.ops.cpu.entry_merging` and give the same bits.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.cpu import entry_merging as fast
from larder.ops.packing import packed_rows, storage_rows

SOURCE_CHUNK = 1 << 14  # sources widened to float32 at once: 8 MiB of keys of size 128

# Sources, targets and weights of folds, one of each per row.
FoldRows = tuple[Int64[Tensor, " G"], Int64[Tensor, " G"], Float[Tensor, " G"]]
# Sources, targets, weights of keys and of values.
SpreadFolds = tuple[
    Int64[Tensor, " G"], Int64[Tensor, " G"], Float[Tensor, " G"], Float[Tensor, " G"]
]
# Distinct targets, ascending, and their sums of keys and of values.
MergedSums = tuple[Int64[Tensor, " N"], Float[Tensor, "N D"], Float[Tensor, "N D"]]


def updated_means(
    numbers: Float[Tensor, " F"],
    groups: Int64[Tensor, " F"],
    before: Float[Tensor, " K"],
    rate: float,
) -> Float[Tensor, " K"]:
    """A running mean per group, moved by `rate` towards the mean of its numbers.

    It begins at the first mean (NaN stands for none so far) and stays where there are no numbers.
    """
    if fast.supports(numbers):
        return fast.updated_means(numbers, groups, before, rate)
    return reference_updated_means(numbers, groups, before, rate)


def reference_updated_means(
    numbers: Float[Tensor, " F"],
    groups: Int64[Tensor, " F"],
    before: Float[Tensor, " K"],
    rate: float,
) -> Float[Tensor, " K"]:
    """`updated_means` for every device."""
    return update_ema(before, group_means(numbers, groups, len(before)), rate)


def group_means(
    numbers: Float[Tensor, " F"], groups: Int64[Tensor, " F"], count: int
) -> Float[Tensor, " K"]:
    """The mean of each of `count` groups; NaN of none."""
    sums = numbers.new_zeros(count).index_add(0, groups, numbers)
    return sums / torch.bincount(groups, minlength=count)  # 0 / 0 is NaN


def update_ema(
    before: Float[Tensor, " K"], means: Float[Tensor, " K"], rate: float
) -> Float[Tensor, " K"]:
    """Moved by `rate`; where there is no mean it stays, where there was none before it begins."""
    before = before.to(means.device)
    moved = rate * means + (1 - rate) * before
    moved = torch.where(before.isnan(), means, moved)
    return torch.where(means.isnan(), before, moved)


def normalized_folds(
    sources: Int64[Tensor, " F"],
    targets: Int64[Tensor, " F"],
    given: Float[Tensor, " F"],
    counted: Float[Tensor, " F"],
    own: float,
) -> FoldRows:
    """Folds that turn every target into a weighted mean of itself and its sources.

    Args:
        sources, targets: packed entries; a source has one target and is none itself.
        given: the weight of each source.
        counted: what the total of its target grows by for it.
        own: weight of a target itself.

    Returns:
        The sources in order, then every target as its own source, ascending.
    """
    if fast.supports(given):
        return fast.normalized_folds(sources, targets, given, counted, own)
    return reference_normalized_folds(sources, targets, given, counted, own)


def reference_normalized_folds(
    sources: Int64[Tensor, " F"],
    targets: Int64[Tensor, " F"],
    given: Float[Tensor, " F"],
    counted: Float[Tensor, " F"],
    own: float,
) -> FoldRows:
    """`normalized_folds` for every device."""
    into, places = torch.unique(targets, return_inverse=True)
    owned = given.new_full((len(into),), own)
    totals = owned.index_add(0, places, counted)
    weights = torch.cat([given / totals[places], owned / totals])
    return torch.cat([sources, into]), torch.cat([targets, into]), weights


def thresholded_folds(
    sources: Int64[Tensor, " F"],
    targets: Int64[Tensor, " F"],
    heads: Int64[Tensor, " F"],
    likeness: Float[Tensor, " F"],
    given: Float[Tensor, " F"],
    own: float,
    before: Float[Tensor, " K"],
    rate: float,
    slack: float,
) -> tuple[Float[Tensor, " K"], FoldRows]:
    """A threshold per head that follows how alike sources are to targets, and who is above it.

    Args:
        targets: -1 where there is none: such a source counts nowhere.
        given, own: as in `normalized_folds`, where sources also count as what they are given.
        before, rate: as in `updated_means`, of the likeness.
        slack: by how much a source may lie below the threshold.

    Returns:
        The new thresholds, and the folds of those that are alike enough.
    """
    case = sources, targets, heads, likeness, given, own, before, rate, slack
    return (
        fast.thresholded_folds(*case)
        if fast.supports(likeness)
        else reference_thresholded_folds(*case)
    )


def reference_thresholded_folds(
    sources: Int64[Tensor, " F"],
    targets: Int64[Tensor, " F"],
    heads: Int64[Tensor, " F"],
    likeness: Float[Tensor, " F"],
    given: Float[Tensor, " F"],
    own: float,
    before: Float[Tensor, " K"],
    rate: float,
    slack: float,
) -> tuple[Float[Tensor, " K"], FoldRows]:
    """`thresholded_folds` for every device."""
    found = targets >= 0
    moved = reference_updated_means(likeness[found], heads[found], before, rate)
    alike = found & (likeness >= moved[heads] - slack)
    shares = given[alike]
    return moved, reference_normalized_folds(sources[alike], targets[alike], shares, shares, own)


def spread_folds(
    mass: Float[Tensor, " C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    kept: Int64[Tensor, " N"],
    new_lengths: tuple[int, ...],
    gone: Int64[Tensor, " F"],
    window: int,
    drawn: Float[Tensor, " _"],
) -> SpreadFolds:
    """Folds that add the value of what goes to the kept entries that follow it in its head.

    Each of the next `window` gets as much of it, together the share that the weight of what goes is
    of the mean weight of all that follow, at most all of it. Keys stay.

    Args:
        mass: the weight of each row of a flat storage, 0 or more.
        starts, lengths: where each kv head lies in it; int64 in host memory.
        kept, gone: packed entries, ascending.
        drawn: a number for each of `gone`: those below their share join whole, the others not at
            all. Empty where all join by their shares.

    Returns:
        The sources in order, then every target as its own source, ascending.
    """
    case = mass, starts, lengths, kept, new_lengths, gone, window, drawn
    served = fast.supports(mass[:0]) and len(gone) * window <= fast.MAX_FOLDS
    return fast.spread_folds(*case) if served else reference_spread_folds(*case)


def reference_spread_folds(
    mass: Float[Tensor, " C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    kept: Int64[Tensor, " N"],
    new_lengths: tuple[int, ...],
    gone: Int64[Tensor, " F"],
    window: int,
    drawn: Float[Tensor, " _"],
) -> SpreadFolds:
    """`spread_folds` for every device and any number."""
    device = gone.device
    rows = packed_rows(starts, lengths).to(device)
    places = torch.searchsorted(kept, gone)[:, None] + torch.arange(window, device=device)
    heads = torch.searchsorted(lengths.cumsum(0).to(device), gone, right=True)
    stops = torch.tensor(new_lengths, device=device).cumsum(0)[heads]
    here = places < stops[:, None]
    targets, count = kept[places.clamp(max=len(kept) - 1)], here.sum(1)  # [F, window]
    sums = torch.cat([mass.new_zeros(1).double(), mass[rows[kept]].double().cumsum(0)])
    around = ((sums[stops] - sums[places[:, 0]]) / (stops - places[:, 0])).to(mass.dtype)
    shares = (mass[rows[gone]] / around).nan_to_num(0).clamp(0, 1)
    if len(drawn):
        shares = (drawn < shares).float()
    joins = here & (shares > 0)[:, None]
    weights = (shares / count)[:, None].expand_as(targets)[joins]
    sources, targets = gone[:, None].expand_as(targets)[joins], targets[joins]
    into = torch.unique(targets)
    ones = weights.new_ones(len(into))
    rest = torch.cat([torch.zeros_like(weights), ones]), torch.cat([weights, ones])
    return torch.cat([sources, into]), torch.cat([targets, into]), *rest


def weighted_sums(
    keys: Float[Tensor, "C D"],
    values: Float[Tensor, "C D"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    sources: Int64[Tensor, " F"],
    targets: Int64[Tensor, " F"],
    key_weights: Float[Tensor, " F"],
    value_weights: Float[Tensor, " F"],
) -> MergedSums:
    """What becomes of each target: the sum of its sources, each by its weight, in float32.

    Args:
        starts, lengths: where each kv head lies in the flat storage; int64 in host memory.
        sources, targets: packed entries; sources are among those held.
    """
    case = keys, values, starts, lengths, sources, targets, key_weights, value_weights
    if fast.supports_rows(keys, values, len(sources)):
        return fast.weighted_sums(*case)
    return reference_weighted_sums(*case)


def reference_weighted_sums(
    keys: Float[Tensor, "C D"],
    values: Float[Tensor, "C D"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    sources: Int64[Tensor, " F"],
    targets: Int64[Tensor, " F"],
    key_weights: Float[Tensor, " F"],
    value_weights: Float[Tensor, " F"],
) -> MergedSums:
    """`weighted_sums` for every device, type and number, some sources at a time."""
    into, places = torch.unique(targets, return_inverse=True)
    rows = storage_rows(sources.cpu(), starts, lengths).to(keys.device)
    key_sums = keys.new_zeros(len(into), keys.shape[1], dtype=torch.float32)
    value_sums = torch.zeros_like(key_sums)
    parts = rows, places, key_weights, value_weights
    for some, to, of_keys, of_values in zip(
        *(part.split(SOURCE_CHUNK) for part in parts), strict=True
    ):
        key_sums.index_add_(0, to, keys[some].float() * of_keys[:, None])
        value_sums.index_add_(0, to, values[some].float() * of_values[:, None])
    return into, key_sums, value_sums
