"""The inner loops of looking codes up, compiled by numba at their first call.

Only `larder.ops.fast.codes` imports this module, and only when it is about to look up.
"""

from __future__ import annotations

import numba
import numpy as np

from larder.ops.fast.decode_kernels import compiled, compiled_parallel


@compiled
def look_up_one(table, codes, sums):
    """The sums of one query head."""
    sums[:] = np.float32(0.0)
    for v in range(table.shape[0]):
        values, places = table[v], codes[v]
        for s in range(sums.size):
            sums[s] += values[places[s]]


@compiled
def look_up(tables, codes, sums):
    """All query heads, one after the other."""
    for k in range(sums.shape[0]):
        for g in range(sums.shape[1]):
            look_up_one(tables[k, g], codes[k], sums[k, g])


@compiled_parallel
def look_up_in_parallel(tables, codes, sums):
    """As `look_up`, shared by threads."""
    group = sums.shape[1]
    for n in numba.prange(sums.shape[0] * group):
        look_up_one(tables[n // group, n % group], codes[n // group], sums[n // group, n % group])
