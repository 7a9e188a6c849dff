"""Entry merging on a CPU: one kernel call for the few entries of a decode step."""

from __future__ import annotations

from ctypes import CDLL, byref

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.cpu.c_library import FoldingCall, SpreadingCall, SummingCall, c_library
from larder.ops.cpu.decode_attention import SUPPORTED_DTYPES, as_numpy

MAX_FOLDS = 1 << 10  # above it torch is as fast, and uses all threads


def supports(numbers: Tensor) -> bool:
    """True for a few float32 numbers in host memory."""
    return (
        numbers.device.type == "cpu"
        and numbers.dtype is torch.float32
        and len(numbers) <= MAX_FOLDS
    )


def supports_means(numbers: Tensor) -> bool:
    """True for a few numbers where numba's kernels are used: no C kernel was compiled."""
    return c_library() is None and supports(numbers)


def supports_rows(keys: Tensor, values: Tensor, folds: int) -> bool:
    """True for a few folds over contiguous CPU storage of a supported dtype."""
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
    """Kernel of `updated_means`; the same bits as torch."""
    from larder.ops.cpu import entry_merge_kernels as kernels  # compiles: not before it is needed

    moved = torch.empty(len(before))
    kernels.update_means(
        numbers.contiguous().numpy(),
        groups.numpy(),
        before.contiguous().numpy(),
        np.float32(rate),
        np.float32(1 - rate),
        moved.numpy(),
    )
    return moved


def normalized_folds(
    sources: Int64[Tensor, " F"],
    targets: Int64[Tensor, " F"],
    given: Float[Tensor, " F"],
    counted: Float[Tensor, " F"],
    own: float,
) -> tuple[Int64[Tensor, " G"], Int64[Tensor, " G"], Float[Tensor, " G"]]:
    """Kernel of `normalized_folds`; the same bits as torch."""
    if (library := c_library()) is not None:
        folds, buffers = len(sources), torch.empty(2, 2 * len(sources), dtype=torch.int64)
        weights = torch.empty(2 * folds)
        buffers[0, :folds], buffers[1, :folds], weights[:folds] = sources, targets, given
        counted = counted.contiguous()
        pointers = (part.data_ptr() for part in (counted, *buffers, weights))
        count = library.larder_normalize_folds(folds, own, *pointers)
        _check_folds(count)
        return buffers[0, :count], buffers[1, :count], weights[:count]
    from larder.ops.cpu import entry_merge_kernels as kernels

    froms, intos, weights = kernels.normalize_folds(
        sources.contiguous().numpy(),
        targets.contiguous().numpy(),
        given.contiguous().numpy(),
        counted.contiguous().numpy(),
        np.float32(own),
    )
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
    """Kernel of `thresholded_folds`; the same bits as torch."""
    sources, targets, heads = sources.contiguous(), targets.contiguous(), heads.contiguous()
    likeness, given, before = likeness.contiguous(), given.contiguous(), before.contiguous()
    moved = torch.empty(len(before), dtype=torch.float32)
    library = c_library()
    if library is None:
        from larder.ops.cpu import entry_merge_kernels as kernels

        rows = kernels.threshold_folds(
            sources.numpy(),
            targets.numpy(),
            heads.numpy(),
            likeness.numpy(),
            given.numpy(),
            before.numpy(),
            np.float32(rate),
            np.float32(1 - rate),
            np.float32(slack),
            np.float32(own),
            moved.numpy(),
        )
        froms, intos, weights = (torch.from_numpy(part) for part in rows)
        return moved, (froms, intos, weights)
    froms, intos = torch.empty(2, 2 * len(sources), dtype=torch.int64)
    weights = torch.empty(2 * len(sources), dtype=torch.float32)
    call = FoldingCall(
        sources=sources.data_ptr(),
        targets=targets.data_ptr(),
        heads=heads.data_ptr(),
        likeness=likeness.data_ptr(),
        given=given.data_ptr(),
        before=before.data_ptr(),
        moved=moved.data_ptr(),
        froms=froms.data_ptr(),
        intos=intos.data_ptr(),
        weights=weights.data_ptr(),
        count=len(sources),
        groups=len(before),
        rate=rate,
        rest=1 - rate,
        slack=slack,
        own=own,
    )
    folds = library.larder_threshold_folds(byref(call))
    _check_folds(folds)
    return moved, (froms[:folds], intos[:folds], weights[:folds])


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
    """Kernel of `spread_folds`; sums are in another order than with torch."""
    library = c_library()
    if library is None:
        from larder.ops.cpu import entry_merge_kernels as kernels

        folds = kernels.spread_folds(
            gone.numpy(),
            kept.contiguous().numpy(),
            starts.numpy(),
            lengths.numpy(),
            np.array(new_lengths, np.int64),
            mass.detach().contiguous().numpy(),
            window,
            drawn.double().numpy(),
        )
        sources, targets, key_weights, value_weights = map(torch.from_numpy, folds)
        return sources, targets, key_weights, value_weights
    remaining = torch.tensor(new_lengths, dtype=torch.int64)
    froms, intos = torch.empty(2, 2 * len(gone) * window, dtype=torch.int64)
    key_weights, value_weights = torch.empty(2, len(froms))
    given = mass.detach().float(), starts, lengths, remaining, kept, gone, drawn.float()
    held = [part.contiguous() for part in given]  # the call has addresses of these
    names = "mass", "starts", "lengths", "new_lengths", "kept", "gone", "drawn"
    call = SpreadingCall(
        **{name: part.data_ptr() for name, part in zip(names, held, strict=True)},
        froms=froms.data_ptr(),
        intos=intos.data_ptr(),
        key_weights=key_weights.data_ptr(),
        value_weights=value_weights.data_ptr(),
        count=len(gone),
        window=window,
    )
    if not drawn.numel():
        call.drawn = None
    count = library.larder_spread_folds(byref(call)) if len(gone) else 0
    _check_folds(count)
    return froms[:count], intos[:count], key_weights[:count], value_weights[:count]


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
    """Kernel of `weighted_sums`; the same bits as torch."""
    layout = (starts.contiguous(), lengths.contiguous(), sources.contiguous(), targets.contiguous())
    key_weights, value_weights = key_weights.contiguous(), value_weights.contiguous()
    if (library := c_library()) is not None:
        into, key_sums = _sum_rows(library, keys.detach(), layout, key_weights)
        _, value_sums = _sum_rows(library, values.detach(), layout, value_weights)
        return into, key_sums, value_sums
    from larder.ops.cpu import entry_merge_kernels as kernels

    starts, lengths, sources, targets = layout
    into, key_sums, value_sums = kernels.sum_rows(
        as_numpy(keys.detach()),
        as_numpy(values.detach()),
        starts.numpy(),
        lengths.numpy(),
        sources.numpy(),
        targets.numpy(),
        key_weights.numpy(),
        value_weights.numpy(),
    )
    return torch.from_numpy(into), torch.from_numpy(key_sums), torch.from_numpy(value_sums)


def _sum_rows(
    library: CDLL,
    stored: Float[Tensor, "C D"],
    layout: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: Float[Tensor, " F"],
) -> tuple[Int64[Tensor, " N"], Float[Tensor, "N D"]]:
    """Distinct targets, and the sums of their sources' rows.

    Args:
        layout: starts and lengths of the heads, sources, targets.
    """
    starts, lengths, sources, targets = layout
    into = torch.empty(len(sources), dtype=torch.int64)
    sums = torch.empty(len(sources), stored.shape[1], dtype=torch.float32)
    call = SummingCall(
        stored=stored.data_ptr(),
        starts=starts.data_ptr(),
        lengths=lengths.data_ptr(),
        sources=sources.data_ptr(),
        targets=targets.data_ptr(),
        weights=weights.data_ptr(),
        into=into.data_ptr(),
        sums=sums.data_ptr(),
        dim=stored.shape[1],
        item_bytes=stored.element_size(),
        count=len(sources),
    )
    count = library.larder_sum_rows(byref(call))
    return into[:count], sums[:count]


def _check_folds(count: int) -> None:
    if count < 0:
        raise MemoryError("The merges of entries could not allocate their buffers.")
