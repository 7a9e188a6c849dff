"""Folding in host memory: the few entries of a decode step cost one call each, not twenty."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.cpu.decode_attention import SUPPORTED_DTYPES, as_numpy

MAX_FOLDS = 1 << 10  # from there on torch is as fast, and uses all threads


def supports(numbers: Tensor) -> bool:
    """Whether the kernels take this call: a few float32 numbers in host memory."""
    return (
        numbers.device.type == "cpu"
        and numbers.dtype is torch.float32
        and len(numbers) <= MAX_FOLDS
    )


def supports_rows(keys: Tensor, values: Tensor, folds: int) -> bool:
    """Whether the kernel sums rows of this storage."""
    return (
        keys.device.type == "cpu"
        and keys.dtype in SUPPORTED_DTYPES
        and values.dtype is keys.dtype
        and folds <= MAX_FOLDS
        and keys.is_contiguous()
        and values.is_contiguous()
    )


def updated_means(
    numbers: Float[Tensor, " F"],
    groups: Int64[Tensor, " F"],
    before: Float[Tensor, " K"],
    rate: float,
) -> Float[Tensor, " K"]:
    """The same bits as `readable_followed_means`."""
    from larder.ops.cpu import entry_merging_kernels as kernels  # compiles: not before it is needed

    moved = torch.empty(len(before))
    rates = np.float32(rate), np.float32(1 - rate)
    told = numbers.contiguous().numpy(), groups.numpy(), before.contiguous().numpy()
    kernels.update_means(*told, *rates, moved.numpy())
    return moved


def normalized_folds(
    sources: Int64[Tensor, " F"],
    targets: Int64[Tensor, " F"],
    given: Float[Tensor, " F"],
    counted: Float[Tensor, " F"],
    own: float,
) -> tuple[Int64[Tensor, " G"], Int64[Tensor, " G"], Float[Tensor, " G"]]:
    """The same bits as `readable_weighed`."""
    from larder.ops.cpu import entry_merging_kernels as kernels

    told = (part.contiguous().numpy() for part in (sources, targets, given, counted))
    froms, intos, weights = kernels.normalize_folds(*told, np.float32(own))
    return torch.from_numpy(froms), torch.from_numpy(intos), torch.from_numpy(weights)


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
) -> tuple[
    Float[Tensor, " K"], tuple[Int64[Tensor, " G"], Int64[Tensor, " G"], Float[Tensor, " G"]]
]:
    """The same bits as `readable_alike_folds`."""
    from larder.ops.cpu import entry_merging_kernels as kernels

    moved = torch.empty(len(before))
    told = (part.contiguous().numpy() for part in (sources, targets, heads, likeness, given))
    numbers = (np.float32(number) for number in (rate, 1 - rate, slack, own))
    rows = kernels.threshold_folds(*told, before.contiguous().numpy(), *numbers, moved.numpy())
    froms, intos, weights = (torch.from_numpy(part) for part in rows)
    return moved, (froms, intos, weights)


def spread_folds(
    mass: Float[Tensor, " C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    kept: Int64[Tensor, " N"],
    new_lengths: tuple[int, ...],
    gone: Int64[Tensor, " F"],
    window: int,
    drawn: Float[Tensor, " _"],
) -> tuple[Int64[Tensor, " G"], Int64[Tensor, " G"], Float[Tensor, " G"], Float[Tensor, " G"]]:
    """As `readable_spread_folds`; sums are in another order."""
    from larder.ops.cpu import entry_merging_kernels as kernels

    packed = gone.numpy(), kept.contiguous().numpy()
    counts = starts.numpy(), lengths.numpy(), np.array(new_lengths, np.int64)
    told = mass.detach().contiguous().numpy(), window, drawn.double().numpy()
    into, targets, of_keys, of_values = map(
        torch.from_numpy, kernels.spread_folds(*packed, *counts, *told)
    )
    return into, targets, of_keys, of_values


def weighted_sums(
    keys: Float[Tensor, "C D"],
    values: Float[Tensor, "C D"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    sources: Int64[Tensor, " F"],
    targets: Int64[Tensor, " F"],
    key_weights: Float[Tensor, " F"],
    value_weights: Float[Tensor, " F"],
) -> tuple[Int64[Tensor, " N"], Float[Tensor, "N D"], Float[Tensor, "N D"]]:
    """The same bits as `readable_weighted_sums`."""
    from larder.ops.cpu import entry_merging_kernels as kernels

    stored = as_numpy(keys.detach()), as_numpy(values.detach())
    folds = (part.contiguous().numpy() for part in (sources, targets, key_weights, value_weights))
    into, key_sums, value_sums = kernels.sum_rows(*stored, starts.numpy(), lengths.numpy(), *folds)
    return torch.from_numpy(into), torch.from_numpy(key_sums), torch.from_numpy(value_sums)
