"""The inner loops of choosing, compiled by numba at their first call.

Only `larder.ops.cpu.choice` imports this module, and only when it is about to choose.
"""

from __future__ import annotations

import numpy as np

from larder.ops.cpu.decode_attention_kernels import njit_kernel


@njit_kernel
def lowest_scores(scores, spared, worst, values):
    """Fill `worst` with the places of the lowest scores, the lowest first.

    Of equals the later one is lower. What is spared counts as infinite; an empty array spares none.
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
    """Write the packed places of all but the lowest of every head."""
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
