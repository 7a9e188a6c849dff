"""Numba kernels of top-k selection, compiled at their first call.

`larder.ops.cpu.topk` imports this module when it calls a kernel. The threshold score is found by a
radix search over its bits from the highest down: four counts, each over the remaining candidates.
"""

from __future__ import annotations

import numpy as np

from larder.ops.cpu.decode_attention_kernels import njit_exact, njit_kernel

STEPS = ((21, 11), (14, 7), (7, 7), (0, 7))  # lowest bit and number of bits of each count
SIGN = np.uint32(1 << 31)


@njit_exact
def sortable_bits(scores, ranks):
    """Unsigned integers in the order of the scores; both zeros are equal."""
    numbers = (scores + np.float32(0.0)).view(np.uint32)
    for s in range(scores.size):
        ranks[s] = ~numbers[s] if numbers[s] & SIGN else numbers[s] | SIGN


@njit_exact
def radix_threshold(ranks, count):
    """Lowest of the `count` highest ranks, and the number of its equals among these."""
    edge = np.uint32(0)
    wanted = count
    left = ranks  # those whose higher bits are the edge's
    for low, width in STEPS:
        mask = np.uint32((1 << width) - 1)
        counts = np.zeros(1 << width, np.int64)
        for s in range(left.size):
            counts[(left[s] >> np.uint32(low)) & mask] += 1
        bucket = np.int64((left.max() >> np.uint32(low)) & mask)
        while counts[bucket] < wanted:
            wanted -= counts[bucket]
            bucket -= 1
        edge |= np.uint32(bucket) << np.uint32(low)
        some = np.empty(counts[bucket], np.uint32)
        found = 0
        for s in range(left.size):
            if (left[s] >> np.uint32(low)) & mask == bucket:
                some[found] = left[s]
                found += 1
        left = some
    return edge, wanted


@njit_exact
def mark_highest(scores, count, marks):
    """Mark the `count` highest scores of each row, ties to the first; 0 < count < row length."""
    ranks = np.empty(scores.shape[1], np.uint32)
    for row in range(scores.shape[0]):
        sortable_bits(scores[row], ranks)
        edge, wanted = radix_threshold(ranks, count)
        for s in range(ranks.size):
            marks[row, s] = ranks[s] > edge
            if ranks[s] == edge and wanted > 0:
                marks[row, s] = True
                wanted -= 1


@njit_kernel
def lowest_scores(scores, spared, worst, values):
    """Fill `worst` with the indices of the lowest scores, the lowest first.

    Of equals the later one is lower. Spared scores count as infinite; an empty array spares none.
    """
    values[:] = np.inf
    worst[:] = -1
    last = worst.size - 1
    for s in range(scores.size):
        score = scores[s]
        if spared.size and spared[s]:
            score = np.float32(np.inf)
        if worst[last] >= 0 and score > values[last]:
            continue
        i = last
        while i > 0 and (worst[i - 1] < 0 or score <= values[i - 1]):
            values[i], worst[i] = values[i - 1], worst[i - 1]
            i -= 1
        values[i], worst[i] = score, s


@njit_kernel
def keep_highest(scores, spared, lengths, count, kept):
    """Write the packed indices of all but the lowest scores of every head."""
    first = 0
    written = 0
    for h in range(lengths.size):
        gone = lengths[h] - count
        if gone > 0:
            worst = np.empty(gone, np.int64)
            own = slice(first, first + lengths[h])
            lowest_scores(scores[own], spared[own], worst, np.empty(gone, np.float32))
            worst.sort()
        else:
            worst = np.empty(0, np.int64)
        begin = 0
        for w in range(worst.size + 1):
            end = worst[w] if w < worst.size else lengths[h]
            run = kept[written : written + max(end - begin, 0)]
            for s in range(run.size):
                run[s] = first + begin + s
            written += run.size
            begin = end + 1
        first += lengths[h]
