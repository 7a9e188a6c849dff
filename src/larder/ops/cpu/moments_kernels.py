"""Numba kernels of running moments, compiled at their first call.

Only `larder.ops.cpu.moments` imports this module, when it calls a kernel.
"""

from __future__ import annotations

import numpy as np

from larder.ops.cpu.decode_attention_kernels import njit_exact


@njit_exact
def add_moments(count, mean, spread, numbers, counted, joined):
    """Count, mean and spread after one more number each, into `joined` [3, S]."""
    for s in range(numbers.size):
        fresh = np.float32(1.0) if counted[s] else np.float32(0.0)
        total = count[s] + fresh
        shift = numbers[s] - mean[s]
        share = fresh / max(total, np.float32(1.0))
        joined[0, s] = total
        joined[1, s] = mean[s] + shift * share
        joined[2, s] = spread[s] + shift * shift * count[s] * share


@njit_exact
def mean_if_same_positions(numbers, positions, starts, lengths, mean):
    """Compute the mean into the zeros `mean`; False if the heads have different positions."""
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
