"""Whether something grows: a slope with its interval, from samples over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCKS = 10
# Of Student's t with BLOCKS - 2 degrees of freedom, 97.5 %.
STUDENT = 2.306


@dataclass(frozen=True)
class Growth:
    """A straight line through samples.

    Args:
        level: mean of all.
        slope: per second.
        low, high: where the slope is with 95 %.
        gained: what the slope comes to over all samples.
    """

    level: float
    slope: float
    low: float
    high: float
    gained: float

    def is_real(self, tolerance: float) -> bool:
        """Whether it goes up for certain, and by more than a tolerance over all samples."""
        return self.low > 0 and self.gained > tolerance


def growth(seconds: Sequence[float], values: Sequence[float]) -> Growth:
    """The line through the means of ten blocks, which know less of each other than samples do.

    Raises:
        ValueError: there are fewer than two samples per block.
    """
    if len(values) < 2 * BLOCKS:
        raise ValueError(f"{len(values)} samples are too few for {BLOCKS} blocks of 2")
    blocks = [np.array_split(np.asarray(told, float), BLOCKS) for told in (seconds, values)]
    times, means = (np.array([block.mean() for block in own]) for own in blocks)
    centered = times - times.mean()
    slope = float(centered @ means / (centered @ centered))
    left = means - means.mean() - slope * centered
    error = float(np.sqrt(left @ left / (BLOCKS - 2) / (centered @ centered)))
    span = seconds[-1] - seconds[0]
    low, high = slope - STUDENT * error, slope + STUDENT * error
    return Growth(float(np.mean(values)), slope, low, high, slope * span)
