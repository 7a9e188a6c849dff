"""The inner loops of looking codes up, compiled by numba at their first call.

Only `larder.ops.cpu.codes` imports this module, and only when it is about to look up.
"""

from __future__ import annotations

import numba
import numpy as np

from larder.ops.cpu.decode_attention_kernels import njit_kernel, njit_parallel


@njit_kernel
def sum_codes_of_head(table, codes, sums):
    """The sums of one query head."""
    sums[:] = np.float32(0.0)
    for v in range(table.shape[0]):
        values, places = table[v], codes[v]
        for s in range(sums.size):
            sums[s] += values[places[s]]


@njit_kernel
def sum_codes(tables, codes, sums):
    """All query heads, one after the other."""
    for k in range(sums.shape[0]):
        for g in range(sums.shape[1]):
            sum_codes_of_head(tables[k, g], codes[k], sums[k, g])


@njit_parallel
def sum_codes_parallel(tables, codes, sums):
    """As `sum_codes`, shared by threads."""
    group = sums.shape[1]
    for n in numba.prange(sums.shape[0] * group):
        sum_codes_of_head(
            tables[n // group, n % group], codes[n // group], sums[n // group, n % group]
        )
