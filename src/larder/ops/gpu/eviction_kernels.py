"""Triton kernels of an eviction behind a decode step over pages; see `ops.page_eviction`.

Two launches: one program per segment finds the entry that goes and merges it, then programs for
some dimensions of each segment close its gap from front to back.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Float, Int32
from torch import Tensor

from larder.ops.gpu.launch import launch
from larder.ops.pages import EntryMerging, EvictionLimits, PagedEntries

BLOCK = 64  # entries that a program reads at a time
DIMS = 32  # of keys and values that a program moves


def evict_lowest(
    entries: PagedEntries,
    scores: Float[Tensor, "N P"],
    table: Int32[Tensor, "S W"],
    limits: EvictionLimits,
    merging: EntryMerging | None = None,
) -> None:
    """Evict an entry from segments with one too many; see `ops.page_eviction.evict_lowest`."""
    (_, page_tokens, head_dim), segments = entries.keys.shape, len(table)
    victims = table.new_empty(segments)
    state = (scores,) * 4  # not read
    if merging is not None:
        state = merging.rates, merging.thresholds, merging.newest, merging.log_counts
    launch(
        _choose,
        (segments,),
        entries.keys,
        entries.values,
        entries.positions,
        scores,
        table,
        *limits,
        *state,
        victims,
        table.shape[1],
        0.0 if merging is None else merging.slack,
        IS_MERGING=merging is not None,
        P=page_tokens,
        D=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        BLOCK=BLOCK,
    )
    launch(
        _close,
        (segments, triton.cdiv(head_dim, DIMS) + 1),
        entries.keys,
        entries.values,
        entries.positions,
        entries.columns,
        table,
        limits.lengths,
        victims,
        table.shape[1],
        entries.columns.stride(0),
        COLUMNS=len(entries.columns),
        P=page_tokens,
        D=head_dim,
        DIMS=DIMS,
        BLOCK=BLOCK,
    )


@triton.jit
def _rows(pages, offsets, mask, P: tl.constexpr):
    """Pool rows of entries of a segment, whose pages begin at an address."""
    return tl.load(pages + offsets // P, mask=mask, other=0).to(tl.int64) * P + offsets % P


@triton.jit
def _choose(
    keys,
    values,
    positions,
    scores,
    table,
    lengths,
    counts,
    firsts,
    stops,
    rates,
    thresholds,
    newest,
    log_counts,
    victims,
    width,
    slack,
    IS_MERGING: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment = tl.program_id(0)
    length, pages = tl.load(lengths + segment), table + segment * width
    if length <= tl.load(counts + segment):
        tl.store(victims + segment, length)
        return
    first, stop = tl.load(firsts + segment), tl.load(stops + segment)
    victim = _lowest(positions, scores, pages, length, first, stop, P, BLOCK)
    tl.store(victims + segment, victim)
    if IS_MERGING:
        rate = tl.load(rates + segment)
        if rate > 0:
            best, nearest = _nearest(keys, pages, length, victim, P, D, PADDED, BLOCK)
            threshold = _moved(thresholds + tl.load(pages), rate, best)
            if best >= threshold - slack:
                source, target = _row(pages, victim, P), _row(pages, nearest, P)
                last = tl.load(newest + segment)
                share = _received(scores, positions, source, last)
                share = share / _received(scores, positions, target, last)
                _fold(values, log_counts, source, target, share, D, PADDED)


@triton.jit
def _row(pages, index, P: tl.constexpr):
    """Pool row of an entry of a segment, whose pages begin at an address."""
    return tl.load(pages + index // P).to(tl.int64) * P + index % P


@triton.jit
def _lowest(positions, scores, pages, length, first, stop, P: tl.constexpr, BLOCK: tl.constexpr):
    """Index of the entry of the lowest score, the last of equals; NaN ranks below all, and spared
    entries above."""
    lowest, victim = float("inf"), 0
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        is_held = offsets < length
        rows = _rows(pages, offsets, is_held, P)
        own = tl.load(positions + rows, mask=is_held, other=0)
        ranked = tl.load(scores + rows, mask=is_held, other=float("inf"))
        ranked = tl.where(ranked == ranked, ranked, float("-inf"))
        ranked = tl.where((own < first) | (own >= stop), float("inf"), ranked)
        low = tl.min(ranked, 0)
        last = tl.max(tl.where(is_held & (ranked == low), offsets, 0), 0)
        victim = tl.where(low <= lowest, last, victim)
        lowest = tl.minimum(low, lowest)
    return victim


@triton.jit
def _nearest(
    keys,
    pages,
    length,
    victim,
    P: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest cosine of a key with those of the other entries, and whose it is; -inf without."""
    dims = tl.arange(0, PADDED)
    is_dim = dims < D
    source = _row(pages, victim, P)
    gone = tl.load(keys + source * D + dims, mask=is_dim, other=0.0).to(tl.float32)
    gone = gone / tl.maximum(tl.sqrt(tl.sum(gone * gone, 0)), 1e-12)
    best, nearest = float("-inf"), 0
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        is_other = (offsets < length) & (offsets != victim)
        rows = _rows(pages, offsets, is_other, P)
        mask = is_other[:, None] & is_dim[None, :]
        own = tl.load(keys + rows[:, None] * D + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        norms = tl.maximum(tl.sqrt(tl.sum(own * own, 1)), 1e-12)
        likeness = tl.sum(own * gone[None, :], 1) / norms
        likeness = tl.where(is_other, likeness, float("-inf"))
        high = tl.max(likeness, 0)
        index = tl.min(tl.where(is_other & (likeness == high), offsets, length), 0)
        nearest = tl.where(high > best, index, nearest)  # the first of equals
        best = tl.maximum(high, best)
    return best, nearest


@triton.jit
def _moved(threshold, rate, best):
    """Threshold that follows a likeness; infinite, and left as it is, where there is none."""
    before = tl.load(threshold)
    moved = rate * best + (1 - rate) * before
    moved = tl.where(before == before, moved, best)  # NaN before the first
    is_found = best > float("-inf")
    tl.store(threshold, tl.where(is_found, moved, before))
    return tl.where(is_found, moved, float("inf"))


@triton.jit
def _fold(values, log_counts, source, target, share, D: tl.constexpr, PADDED: tl.constexpr):
    """Make a value the mean of itself and another, which has a share of its weight."""
    dims = tl.arange(0, PADDED)
    total = 1 + share
    kept = tl.load(values + target * D + dims, mask=dims < D, other=0.0).to(tl.float32)
    lost = tl.load(values + source * D + dims, mask=dims < D, other=0.0).to(tl.float32)
    merged = lost * (share / total) + kept * (1 / total)
    tl.debug_barrier()
    tl.store(values + target * D + dims, merged.to(values.dtype.element_ty), mask=dims < D)
    tl.store(log_counts + target, tl.load(log_counts + target) - tl.log(1 / total))


@triton.jit
def _received(scores, positions, row, newest):
    """Attention that an entry has received per query that could see it; above 0."""
    age = newest + 1 - tl.load(positions + row)
    return tl.maximum(tl.load(scores + row) / age, 1.17549435e-38)


@triton.jit
def _close(
    keys,
    values,
    positions,
    columns,
    table,
    lengths,
    victims,
    width,
    column_stride,
    COLUMNS: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment, part = tl.program_id(0), tl.program_id(1)
    length, pages = tl.load(lengths + segment), table + segment * width
    dims = part * DIMS + tl.arange(0, DIMS)
    for first in range(tl.load(victims + segment), length - 1, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        is_moved = offsets < length - 1
        there, rows = _rows(pages, offsets, is_moved, P), _rows(pages, offsets + 1, is_moved, P)
        if part * DIMS < D:
            mask = is_moved[:, None] & (dims < D)[None, :]
            own_keys = tl.load(keys + rows[:, None] * D + dims[None, :], mask=mask)
            own_values = tl.load(values + rows[:, None] * D + dims[None, :], mask=mask)
            # All warps have read before one writes a row that another one reads.
            tl.debug_barrier()
            tl.store(keys + there[:, None] * D + dims[None, :], own_keys, mask=mask)
            tl.store(values + there[:, None] * D + dims[None, :], own_values, mask=mask)
        else:
            own = tl.load(positions + rows, mask=is_moved)
            tl.debug_barrier()
            tl.store(positions + there, own, mask=is_moved)
            for column in tl.static_range(COLUMNS):
                numbers = tl.load(columns + column * column_stride + rows, mask=is_moved)
                tl.debug_barrier()
                tl.store(columns + column * column_stride + there, numbers, mask=is_moved)
