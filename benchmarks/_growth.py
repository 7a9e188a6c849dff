"""Growth of a quantity over time: a slope with its confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCKS = 10
# 97.5 % quantile of Student's t with BLOCKS - 2 degrees of freedom.
STUDENT = 2.306


@dataclass(frozen=True)
class Growth:
    """Straight line through samples.

    Args:
        level: mean of all samples.
        slope: change per second.
        low, high: 95 % confidence interval of the slope.
        gained: change over the time of all samples.
    """

    level: float
    slope: float
    low: float
    high: float
    gained: float

    def is_real(self, tolerance: float) -> bool:
        """Test if the slope is significantly positive and the change exceeds a tolerance."""
        return self.low > 0 and self.gained > tolerance


def growth(seconds: Sequence[float], values: Sequence[float]) -> Growth:
    """Line through the means of ten blocks, which are less correlated than samples.

    Raises:
        ValueError: there are fewer than two samples per block.
    """
    if len(values) < 2 * BLOCKS:
        raise ValueError(f"{len(values)} samples are too few for {BLOCKS} blocks of 2")
    blocks = [np.array_split(np.asarray(series, float), BLOCKS) for series in (seconds, values)]
    times, means = (np.array([block.mean() for block in each]) for each in blocks)
    centered = times - times.mean()
    slope = float(centered @ means / (centered @ centered))
    residuals = means - means.mean() - slope * centered
    error = float(np.sqrt(residuals @ residuals / (BLOCKS - 2) / (centered @ centered)))
    span = seconds[-1] - seconds[0]
    low, high = slope - STUDENT * error, slope + STUDENT * error
    return Growth(float(np.mean(values)), slope, low, high, slope * span)
