"""The inner loop of means over heads, compiled by numba at its first call.

Only `larder.ops.cpu.layer_means` imports this module, and only when it is about to join.
"""

from __future__ import annotations

import numpy as np

from larder.ops.cpu.decode_attention_kernels import njit_exact


@njit_exact
def mean_if_same_positions(numbers, positions, starts, lengths, mean):
    """Add up into `mean`, which is zeros; whether all heads hold the same positions."""
    for h in range(lengths.size):
        if lengths[h] != mean.size:
            return False
        astray = 0
        for s in range(mean.size):
            astray += positions[starts[h] + s] != positions[starts[0] + s]
        if astray:
            return False
        for r in range(numbers.shape[0]):
            own = numbers[r, starts[h] : starts[h] + mean.size]
            for s in range(mean.size):
                mean[s] += own[s]
    count = np.float32(lengths.size * numbers.shape[0])
    for s in range(mean.size):
        mean[s] /= count
    return True
