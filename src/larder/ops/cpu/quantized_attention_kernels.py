"""Numba kernels of decode attention over quantized entries, compiled at their first call.

Only `larder.ops.cpu.quantized_attention` imports this module. A side, keys or values, is a tuple:
bits of a code, stored channels, channels per group, True for scales per entry, packed codes [T, B],
offsets and scales, indices of the stored channels [G, W] and their factors [G, W] (empty if there
are none), and the outliers: their places (row x W + channel) and their numbers.
"""

from __future__ import annotations

import numba
import numpy as np

from larder.ops.cpu.decode_attention_kernels import (
    ROWS,
    add_biases,
    merge_splits,
    njit_kernel,
    njit_parallel,
    online_softmax,
    scale,
    score,
)

HALF_BIAS = np.float32(2.0**112)  # exponents of float16 are biased by 15, of float32 by 127


@njit_kernel
def load_float16(halves, numbers):
    """Float32 from the bits of float16, subnormal numbers included."""
    bits = numbers.view(np.uint32)
    for i in range(halves.size):
        half = np.uint32(halves[i])
        bits[i] = ((half & np.uint32(0x7FFF)) << np.uint32(13)) | (
            (half & np.uint32(0x8000)) << np.uint32(16)
        )
    for i in range(halves.size):
        numbers[i] *= HALF_BIAS


@njit_kernel
def unpack_field(stored, field, left, width, start, size, first, count, rows):
    """Add one field of the codes; the first one, with the highest bits, is written."""
    is_first, factor = start == 0, np.float32(1 << left)
    mask = np.int32((1 << field) - 1)
    for b in range(count):
        for plane in range(8 // field):
            shift = np.int32(field * plane)
            codes = stored[first + b, start : start + size]
            numbers = rows[b, plane * size : width]
            if is_first:
                for i in range(min(size, numbers.size)):
                    code = np.int32(np.int32(codes[i]) >> shift)
                    numbers[i] = np.float32(np.int32(code & mask)) * factor
            else:
                for i in range(min(size, numbers.size)):
                    code = np.int32(np.int32(codes[i]) >> shift)
                    numbers[i] += np.float32(np.int32(code & mask)) * factor


@njit_kernel
def unpack(stored, bits, width, first, count, rows):
    """Codes of some entries as float32, plane by plane; rows past `count` are not written.

    Every step is cast to 32 bits, where numba would use 64, and loops run over slices from 0 on,
    because a possibly negative index prevents vectorization.
    """
    field, start, left = 8, 0, bits
    while field > 0:
        if bits & field:
            left -= field
            planes = 8 // field
            size = (width + planes - 1) // planes
            unpack_field(stored, field, left, width, start, size, first, count, rows)
            start += size
        field //= 2


@njit_kernel
def scale_entries(side, first, count, rows, offsets, scales):
    """Dequantize entries with scales per entry."""
    width, group = side[1], side[2]
    groups = (width + group - 1) // group
    load_float16(side[5][first * groups : (first + count) * groups], offsets)
    load_float16(side[6][first * groups : (first + count) * groups], scales)
    for b in range(count):
        for p in range(groups):
            offset, scale = offsets[b * groups + p], scales[b * groups + p]
            numbers = rows[b, p * group : min((p + 1) * group, width)]
            for i in range(numbers.size):
                numbers[i] = offset + scale * numbers[i]


@njit_kernel
def accumulate_coded_values(side, first, count, weights, rows, outs, offsets, scales):
    """Add the weighted values of one block; scales of channel groups go into the weights."""
    width, group = side[1], side[2]
    groups = (width + group - 1) // group
    load_float16(side[5][first * groups : (first + count) * groups], offsets)
    load_float16(side[6][first * groups : (first + count) * groups], scales)
    scales[count * groups : (count + 3) * groups] = np.float32(0.0)
    for n in range(outs.shape[0]):
        for p in range(groups):
            base = np.float32(0.0)
            for b in range(count):
                base += weights[n, b] * offsets[b * groups + p]
            start, stop = p * group, min((p + 1) * group, width)
            out = outs[n, start:stop]
            for d in range(out.size):
                out[d] += base
            for b in range(0, count, 4):
                w0 = weights[n, b] * scales[b * groups + p]
                w1 = weights[n, b + 1] * scales[(b + 1) * groups + p]
                w2 = weights[n, b + 2] * scales[(b + 2) * groups + p]
                w3 = weights[n, b + 3] * scales[(b + 3) * groups + p]
                r0, r1 = rows[b, start:stop], rows[b + 1, start:stop]
                r2, r3 = rows[b + 2, start:stop], rows[b + 3, start:stop]
                for d in range(out.size):
                    out[d] += w0 * r0[d] + w1 * r1[d] + w2 * r2[d] + w3 * r3[d]


@njit_kernel
def accumulate_outlier_values(side, first, count, weights, outs, offsets, number):
    """Add the weighted outliers, which were summed as code 0; `offsets` are those of the block."""
    outlier_indices, outliers, width, group = side[9], side[10], side[1], side[2]
    groups = (width + group - 1) // group
    at = first_outlier(outlier_indices, first * width)
    while at < outlier_indices.size and outlier_indices[at] < (first + count) * width:
        load_float16(outliers[at : at + 1], number)
        flat = outlier_indices[at] - first * width
        b, i = flat // width, flat % width
        more = number[0] - offsets[b * groups + i // group]
        for n in range(outs.shape[0]):
            outs[n, i] += weights[n, b] * more
        at += 1


@njit_kernel
def first_outlier(outlier_indices, number):
    """Index of the first outlier at or behind a place."""
    low, high = 0, outlier_indices.size
    while low < high:
        middle = (low + high) // 2
        if outlier_indices[middle] < number:
            low = middle + 1
        else:
            high = middle
    return low


@njit_kernel
def place_outliers(side, first, count, rows, number):
    """Write the outliers into their rows."""
    outlier_indices, outliers, width = side[9], side[10], side[1]
    at = first_outlier(outlier_indices, first * width)
    while at < outlier_indices.size and outlier_indices[at] < (first + count) * width:
        load_float16(outliers[at : at + 1], number)
        flat = outlier_indices[at] - first * width
        rows[flat // width, flat % width] = number[0]
        at += 1


@njit_kernel
def add_outlier_logits(side, first, count, queries, offsets, weights, number):
    """Add the outliers to logits in which they were code 0."""
    outlier_indices, outliers, width = side[9], side[10], side[1]
    at = first_outlier(outlier_indices, first * width)
    while at < outlier_indices.size and outlier_indices[at] < (first + count) * width:
        load_float16(outliers[at : at + 1], number)
        flat = outlier_indices[at] - first * width
        b, i = flat // width, flat % width
        for n in range(queries.shape[0]):
            weights[n, b] += queries[n, i] * (number[0] - offsets[i])
        at += 1


@njit_kernel
def select_query_channels(side, group, queries, channel_queries, scratch):
    """Queries restricted to the stored channels of a group, times their factors."""
    width, channels, factors = side[1], side[7], side[8]
    for n in range(queries.shape[0]):
        for i in range(width):
            channel_queries[n, i] = (
                queries[n, channels[group, i]] if channels.size else queries[n, i]
            )
    if factors.size:
        load_float16(factors[group], scratch)
        for n in range(queries.shape[0]):
            for i in range(width):
                channel_queries[n, i] *= scratch[i]


@njit_kernel
def fold_scales_into_queries(side, group, channel_queries, offsets, scales, folded, bases):
    """Fold the scales of a group into the queries, and its offsets into a base of every logit."""
    width = side[1]
    load_float16(side[5][group * width : (group + 1) * width], offsets)
    load_float16(side[6][group * width : (group + 1) * width], scales)
    for n in range(channel_queries.shape[0]):
        base = np.float32(0.0)
        for i in range(width):
            base += channel_queries[n, i] * offsets[i]
            folded[n, i] = channel_queries[n, i] * scales[i]
        bases[n] = base


@njit_kernel
def attend_group(queries, keys, values, biases, group, start, count, sums, space):
    """Unnormalized attention of `queries` [N, D] over one group, added to earlier sums."""
    peaks, masses, outs = sums
    rows, weights, channel_queries, folded, bases, offsets, scales, by_entry, number = space
    entry_offsets, entry_scales = by_entry
    select_query_channels(keys, group, queries, channel_queries, offsets)
    own = keys[3]
    if not own:
        fold_scales_into_queries(keys, group, channel_queries, offsets, scales, folded, bases)
    for first in range(start, start + count, ROWS):
        size = min(ROWS, start + count - first)
        unpack(keys[4], keys[0], keys[1], first, size, rows)
        if own:
            scale_entries(keys, first, size, rows, entry_offsets, entry_scales)
            place_outliers(keys, first, size, rows, number)
            score(channel_queries, rows, weights)
        else:
            score(folded, rows, weights)
            for n in range(weights.shape[0]):
                for b in range(ROWS):
                    weights[n, b] += bases[n]
            add_outlier_logits(keys, first, size, channel_queries, offsets, weights, number)
        if biases.size:
            add_biases(weights, biases, first, size)
        online_softmax(weights, size, peaks, masses, outs)
        unpack(values[4], values[0], values[1], first, size, rows)
        accumulate_coded_values(
            values, first, size, weights, rows, outs, entry_offsets, entry_scales
        )
        accumulate_outlier_values(values, first, size, weights, outs, entry_offsets, number)


@njit_kernel
def attend_span(queries, keys, values, biases, layout, groups, scaling, bounds, span, sums):
    """Attention over one span of groups, which may cross heads; rows as in decode attention."""
    peaks, masses, outs = sums
    num_queries, head_dim = queries.shape[1:]
    rows = np.zeros((ROWS, head_dim), np.float32)
    weights = np.empty((num_queries, ROWS), np.float32)
    channel_queries = np.empty((num_queries, keys[1]), np.float32)
    folded = np.empty((num_queries, keys[1]), np.float32)
    bases = np.empty(num_queries, np.float32)
    offsets, scales = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    number = np.empty(1, np.float32)
    most = (ROWS + 3) * head_dim
    by_entry = np.zeros(most, np.float32), np.zeros(most, np.float32)
    space = rows, weights, channel_queries, folded, bases, offsets, scales, by_entry, number
    scaled = np.empty((num_queries, head_dim), np.float32)
    offset = 0
    for h in range(groups.size):
        begin = max(bounds[span], offset)
        end = min(bounds[span + 1], offset + groups[h])
        offset += groups[h]
        if begin < end:
            p = span + h
            peaks[p] = -np.inf
            masses[p] = 0.0
            outs[p] = 0.0
            scale(queries[h], scaling, scaled)
            own = peaks[p], masses[p], outs[p]
            for g in range(begin, end):
                group, start, count = layout[g]
                attend_group(scaled, keys, values, biases, group, start, count, own, space)


@njit_kernel
def attend_serially(queries, keys, values, biases, layout, groups, scaling, bounds):
    """Attention over all spans, on one thread: output [K, N, D] and log-sum-exp [K, N]."""
    num_pieces = bounds.size - 1 + groups.size
    peaks = np.empty((num_pieces, queries.shape[1]), np.float32)
    masses = np.empty((num_pieces, queries.shape[1]), np.float32)
    outs = np.empty((num_pieces, queries.shape[1], queries.shape[2]), np.float32)
    for s in range(bounds.size - 1):
        sums = peaks, masses, outs
        attend_span(queries, keys, values, biases, layout, groups, scaling, bounds, s, sums)
    return merge_splits(groups, bounds, peaks, masses, outs)


@njit_parallel
def attend_in_parallel(queries, keys, values, biases, layout, groups, scaling, bounds):
    """`attend_serially` in parallel, one span per thread, with equal results."""
    num_pieces = bounds.size - 1 + groups.size
    peaks = np.empty((num_pieces, queries.shape[1]), np.float32)
    masses = np.empty((num_pieces, queries.shape[1]), np.float32)
    outs = np.empty((num_pieces, queries.shape[1], queries.shape[2]), np.float32)
    for s in numba.prange(bounds.size - 1):
        span, sums = np.int64(s), (peaks, masses, outs)
        attend_span(queries, keys, values, biases, layout, groups, scaling, bounds, span, sums)
    return merge_splits(groups, bounds, peaks, masses, outs)
