"""The inner loop of moments, compiled by numba at its first call.

Only `larder.ops.fast.moments` imports this module, and only when it is about to join.
"""

from __future__ import annotations

import numpy as np

from larder.ops.fast.decode_kernels import compiled_as_written


@compiled_as_written
def join(count, mean, spread, numbers, counted, joined):
    """Count, mean and spread with one more number each, into `joined` [3, S]."""
    for s in range(numbers.size):
        fresh = np.float32(1.0) if counted[s] else np.float32(0.0)
        total = count[s] + fresh
        shift = numbers[s] - mean[s]
        share = fresh / max(total, np.float32(1.0))
        joined[0, s] = total
        joined[1, s] = mean[s] + shift * share
        joined[2, s] = spread[s] + shift * shift * count[s] * share
