"""Merging of entries into weighted sums: thresholds, weights and sums.

All in float32 and in the order of the sources. The CPU kernels in `larder.ops.cpu.entry_merge`
give the same bits as torch.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.cpu import entry_merge as fast
from larder.ops.packing import packed_rows, storage_rows

SOURCE_CHUNK = 1 << 14  # sources widened to float32 at once: 8 MiB of keys of size 128

# Sources, targets and weights of folds, one of each per row.
FoldRows = tuple[Int64[Tensor, " G"], Int64[Tensor, " G"], Float[Tensor, " G"]]
# Sources, targets, weights of keys and of values.
SpreadFolds = tuple[
    Int64[Tensor, " G"], Int64[Tensor, " G"], Float[Tensor, " G"], Float[Tensor, " G"]
]
# Distinct targets, ascending, and their sums of keys and of values.
MergedSums = tuple[Int64[Tensor, " N"], Float[Tensor, "N D"], Float[Tensor, "N Dv"]]


def updated_means(
    numbers: Float[Tensor, " F"],
    groups: Int64[Tensor, " F"],
    before: Float[Tensor, " K"],
    rate: float,
) -> Float[Tensor, " K"]:
    """Exponential moving average per group, updated with the mean of its numbers.

    It starts at the first mean (NaN: none so far) and does not change without numbers.
    """
    if fast.supports_means(numbers):
        return fast.updated_means(numbers, groups, before, rate)
    return update_ema(before, group_means(numbers, groups, len(before)), rate)


def group_means(
    numbers: Float[Tensor, " F"], groups: Int64[Tensor, " F"], count: int
) -> Float[Tensor, " K"]:
    """Mean of each of `count` groups; NaN for an empty one."""
    sums = numbers.new_zeros(count).index_add(0, groups, numbers)
    return sums / torch.bincount(groups, minlength=count)  # 0 / 0 is NaN


def update_ema(
    before: Float[Tensor, " K"], means: Float[Tensor, " K"], rate: float
) -> Float[Tensor, " K"]:
    """Moving averages updated by `rate`; a NaN mean changes nothing, a NaN average is replaced."""
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
        sources, targets: packed entries; a source has one target and is not a target itself.
        given: weight of each source in the sum.
        counted: weight of each source in the total of its target.
        own: weight of a target itself.

    Returns:
        The sources in order, then every target as its own source, ascending.
    """
    if fast.supports(given):
        return fast.normalized_folds(sources, targets, given, counted, own)
    into, indices = torch.unique(targets, return_inverse=True)
    owned = given.new_full((len(into),), own)
    totals = owned.index_add(0, indices, counted)
    weights = torch.cat([given / totals[indices], owned / totals])
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
    """Similarity threshold per head (a moving average), and the folds of sources above it.

    Args:
        targets: -1 for a source without target, which is ignored.
        likeness: similarity of each source to its target.
        given, own: as in `normalized_folds`; `given` is also the weight in the total.
        before, rate: as in `updated_means`, of the similarity.
        slack: distance below the threshold at which a source is still folded.

    Returns:
        The new thresholds, and the folds.
    """
    if fast.supports(likeness):
        return fast.thresholded_folds(
            sources, targets, heads, likeness, given, own, before, rate, slack
        )
    found = targets >= 0
    moved = updated_means(likeness[found], heads[found], before, rate)
    alike = found & (likeness >= moved[heads] - slack)
    shares = given[alike]
    return moved, normalized_folds(sources[alike], targets[alike], shares, shares, own)


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
    """Folds that add the value of a rejected entry to the kept entries behind it in its head.

    The next `window` kept entries get equal parts. In total they get the ratio of the rejected
    entry's weight to the mean weight of all kept entries behind it, at most 1. Keys do not change.

    Args:
        mass: weight of each row of a flat storage, 0 or more.
        starts, lengths: rows of each kv head in the storage; int64 in host memory.
        kept, gone: packed entries that remain and that are rejected, ascending.
        drawn: a random number for each of `gone`: the value is added whole if it is below the
            ratio, else not at all. Empty to add the value times the ratio.

    Returns:
        The sources in order, then every target as its own source, ascending.
    """
    if fast.supports(mass[:0]) and len(gone) * window <= fast.MAX_FOLDS:
        return fast.spread_folds(mass, starts, lengths, kept, new_lengths, gone, window, drawn)
    device = gone.device
    rows = packed_rows(starts, lengths).to(device)
    indices = torch.searchsorted(kept, gone)[:, None] + torch.arange(window, device=device)
    heads = torch.searchsorted(lengths.cumsum(0).to(device), gone, right=True)
    stops = torch.tensor(new_lengths, device=device).cumsum(0)[heads]
    here = indices < stops[:, None]
    targets, count = kept[indices.clamp(max=len(kept) - 1)], here.sum(1)  # [F, window]
    sums = torch.cat([mass.new_zeros(1).double(), mass[rows[kept]].double().cumsum(0)])
    around = ((sums[stops] - sums[indices[:, 0]]) / (stops - indices[:, 0])).to(mass.dtype)
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
    values: Float[Tensor, "C Dv"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    sources: Int64[Tensor, " F"],
    targets: Int64[Tensor, " F"],
    key_weights: Float[Tensor, " F"],
    value_weights: Float[Tensor, " F"],
) -> MergedSums:
    """Weighted sums of the sources of each target, in float32.

    Args:
        starts, lengths: rows of each kv head in the flat storage; int64 in host memory.
        sources, targets: packed entries.
    """
    if fast.supports_rows(keys, values, len(sources)):
        return fast.weighted_sums(
            keys, values, starts, lengths, sources, targets, key_weights, value_weights
        )
    into, indices = torch.unique(targets, return_inverse=True)
    rows = storage_rows(sources.cpu(), starts, lengths).to(keys.device)
    key_sums = keys.new_zeros(len(into), keys.shape[1], dtype=torch.float32)
    value_sums = values.new_zeros(len(into), values.shape[1], dtype=torch.float32)
    parts = rows, indices, key_weights, value_weights
    for some, to, of_keys, of_values in zip(
        *(part.split(SOURCE_CHUNK) for part in parts), strict=True
    ):
        key_sums.index_add_(0, to, keys[some].float() * of_keys[:, None])
        value_sums.index_add_(0, to, values[some].float() * of_values[:, None])
    return into, key_sums, value_sums
