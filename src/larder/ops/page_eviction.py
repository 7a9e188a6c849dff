"""Eviction behind a decode step, over pages: one entry of every segment that has too many.

The entry of the lowest number in a column goes, the last of equals; it may be merged into the most
similar one that stays (D2O). Entries behind it move up, so that those of a segment stay in order of
their positions. How many entries a segment has afterwards is known before. On a GPU with Triton the
kernels of `ops.gpu.eviction_kernels` run; elsewhere torch, which is their readable twin.

A number that is NaN cannot be ranked. On a CPU that is an error, before anything is changed. On a
GPU an error would take a read of the host in every step, which no form makes there: NaN ranks below
all numbers, so that spared entries stay spared.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor
from torch.nn.functional import normalize

from larder.core.errors import ScoreError
from larder.ops.pages import EntryMerging, EvictionLimits, PagedEntries, padded_rows

TINY = torch.finfo(torch.float32).tiny


def evict_lowest(
    entries: PagedEntries,
    scores: Float[Tensor, "N P"],
    table: Int32[Tensor, "S W"],
    limits: EvictionLimits,
    merging: EntryMerging | None = None,
) -> None:
    """Evict the entry of the lowest score from every segment that has one too many.

    Args:
        scores: one of the columns; for merging, the attention that entries have received.
        merging: None where all segments drop what they reject.

    Raises:
        ScoreError: on a CPU a score of a segment that has one too many is NaN; nothing is changed.
    """
    if (kernels := _kernels(entries.keys)) is not None:
        return kernels.evict_lowest(entries, scores, table, limits, merging)
    rows, is_held = padded_rows(table, limits.lengths, scores.shape[1])
    goes = limits.lengths > limits.counts
    if scores.device.type == "cpu":
        _check(scores.flatten()[rows], is_held & goes[:, None])
    victims = _lowest(rows, is_held, entries.positions, scores, limits)
    if merging is not None:
        merges, firsts = goes & (merging.rates > 0), table[:, 0]
        _merge(rows, is_held, victims, merges, firsts, entries, scores, merging)
    _close_gaps(rows, victims, goes, entries, limits.lengths)


def _check(scores: Float[Tensor, "S T"], is_ranked: Bool[Tensor, "S T"]) -> None:
    """Raise a ScoreError if one of the scores that are ranked is NaN."""
    if (is_lost := scores.isnan() & is_ranked).any():
        raise ScoreError(
            f"The accumulated attention is NaN for {int(is_lost.sum())} of {int(is_ranked.sum())} "
            "entries, which cannot be ranked: look for numbers in the model that are not finite."
        )


def _lowest(
    rows: Int64[Tensor, "S T"],
    is_held: Bool[Tensor, "S T"],
    positions: Int32[Tensor, "N P"],
    scores: Float[Tensor, "N P"],
    limits: EvictionLimits,
) -> Int64[Tensor, " S"]:
    """Index of the entry of each segment that goes, if one does; NaN is the lowest score."""
    own, numbers = positions.flatten()[rows], scores.flatten()[rows]
    is_spared = (own < limits.firsts[:, None]) | (own >= limits.stops[:, None])
    ranked = numbers.masked_fill(numbers.isnan(), -torch.inf)
    ranked = ranked.masked_fill(is_spared | ~is_held, torch.inf)
    is_lowest = is_held & (ranked == ranked.amin(1, keepdim=True))
    indices = torch.arange(rows.shape[1], device=rows.device)
    return torch.where(is_lowest, indices, 0).amax(1)


def _merge(
    rows: Int64[Tensor, "S T"],
    is_held: Bool[Tensor, "S T"],
    victims: Int64[Tensor, " S"],
    merges: Bool[Tensor, " S"],
    first_pages: Int32[Tensor, " S"],
    entries: PagedEntries,
    scores: Float[Tensor, "N P"],
    merging: EntryMerging,
) -> None:
    """Merge what is rejected into the nearest entry, where it is similar enough."""
    best, targets = _nearest(rows, is_held, victims, entries.keys)
    is_found, before = merges & ~best.isneginf(), merging.thresholds[first_pages]
    moved = merging.rates * best + (1 - merging.rates) * before
    moved = torch.where(before.isnan(), best, moved)
    moved = torch.where(is_found, moved, before)
    merging.thresholds.index_copy_(0, first_pages.long(), moved)
    folds = is_found & (best >= moved - merging.slack)

    source, target = (rows.gather(1, each[:, None]).squeeze(1) for each in (victims, targets))
    ages = [merging.newest + 1 - entries.positions.flatten()[each] for each in (source, target)]
    received = [scores.flatten()[each] for each in (source, target)]
    own, other = (m / age for m, age in zip(received, ages, strict=True))
    share = own.clamp(min=TINY) / other.clamp(min=TINY)
    total = 1 + share
    stored = entries.values.flatten(0, 1)
    sums = stored[source].float() * (share / total)[:, None]
    sums = sums + stored[target].float() * (1 / total)[:, None]
    into = torch.where(folds, target, 0)  # row 0 is in the null page
    stored.index_copy_(0, into, sums.to(stored.dtype))
    counted = torch.where(folds, -(1 / total).double().log().float(), 0.0)
    merging.log_counts.view(-1).index_add_(0, into, counted)


def _nearest(
    rows: Int64[Tensor, "S T"],
    is_held: Bool[Tensor, "S T"],
    victims: Int64[Tensor, " S"],
    keys: Float[Tensor, "N P D"],
) -> tuple[Float[Tensor, " S"], Int64[Tensor, " S"]]:
    """Largest cosine of the key of each victim with those of the others, and whose it is."""
    units = normalize(keys.flatten(0, 1)[rows].float(), dim=-1)  # [S, T, D]
    picked = victims[:, None, None].expand(-1, 1, units.shape[2])
    likeness = (units @ units.gather(1, picked).mT).squeeze(2)
    indices = torch.arange(rows.shape[1], device=rows.device)
    is_other = is_held & (indices != victims[:, None])
    best, nearest = likeness.masked_fill(~is_other, -torch.inf).max(1)
    return best, nearest


def _close_gaps(
    rows: Int64[Tensor, "S T"],
    victims: Int64[Tensor, " S"],
    goes: Bool[Tensor, " S"],
    entries: PagedEntries,
    lengths: Int32[Tensor, " S"],
) -> None:
    """Move the entries behind each victim one row up."""
    indices = torch.arange(rows.shape[1], device=rows.device)
    is_moved = goes[:, None] & (indices >= victims[:, None]) & (indices < lengths[:, None] - 1)
    targets = torch.where(is_moved, rows, 0).flatten()  # row 0 is in the null page
    sources = rows.roll(-1, 1).flatten()
    for stored in (entries.keys, entries.values, entries.positions, *entries.columns):
        flat = stored.flatten(0, 1)
        flat.index_copy_(0, targets, flat[sources])


def _kernels(pool: Tensor) -> ModuleType | None:
    """Triton's kernels where the pool is on a GPU and Triton is installed; else None."""
    return _eviction_kernels() if pool.device.type == "cuda" else None


@cache
def _eviction_kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from larder.ops.gpu import eviction_kernels

    return eviction_kernels
