"""Bootstrap confidence intervals of mean scores, paired differences and ratios.

The method is Bradley Efron, "Bootstrap Methods: Another Look at the Jackknife" (1979), Annals of
Statistics 7(1), with percentile intervals. Questions about one conversation are answered from one
cache and are correlated, so whole conversations are resampled (cluster bootstrap). Pass
`questions_as_clusters(scores)` to resample questions, as a single file needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from larder.core.arguments import require
from larder.core.errors import BadParameter

Scores = Sequence[Sequence[float]]
Means = Float[ndarray, " resamples"]
Summed = tuple[Float[ndarray, " files"], Int[ndarray, " files"]]


@dataclass(frozen=True)
class Interval:
    """Mean over questions with the bounds of its confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Bootstrap:
    """Percentile bootstrap over files; equal parameters give equal intervals.

    Args:
        resamples: number of resamples, 1 or more.
        coverage: the share of resampled means inside the interval, in (0, 1).
        seed: of the resampling.
    """

    resamples: int = 2_000
    coverage: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.resamples >= 1, "bootstrap.resamples", "1 or more", self.resamples)
        if not 0 < self.coverage < 1:
            raise BadParameter(
                f"bootstrap.coverage must lie between 0 and 1, got {self.coverage}: take 0.95."
            )

    def mean(self, files: Scores) -> Interval:
        """Mean over all questions with its interval.

        Args:
            files: for each file, the score of each of its questions.

        Raises:
            BadParameter: there is no question, or a score is not finite.
        """
        return _mean_interval(self, tuple(tuple(map(float, file)) for file in files))

    def difference(self, first: Scores, second: Scores) -> Interval:
        """Mean of `first` minus `second`, paired by question on the same files.

        An interval that excludes 0 means that the order does not depend on the sample of files.

        Raises:
            BadParameter: the two have different questions, or see `mean`.
        """
        if [len(file) for file in first] != [len(file) for file in second]:
            raise BadParameter(
                f"bootstrap.difference needs the same questions twice, got {_shape(first)} and "
                f"{_shape(second)}: score both systems on the same files."
            )
        pairs = zip(first, second, strict=True)
        return self.mean([[a - b for a, b in zip(*pair, strict=True)] for pair in pairs])

    def ratio(self, first: Scores, second: Scores) -> Interval:
        """Mean of `first` divided by the mean of `second`, on the same files.

        Raises:
            BadParameter: the two have different files, the second mean is not above 0, or see
                `mean`.
        """
        upper, lower = _sums_and_counts(first), _sums_and_counts(second)
        if len(upper[0]) != len(lower[0]):
            raise BadParameter(
                f"bootstrap.ratio needs the same files twice, got {_shape(first)} and "
                f"{_shape(second)}: score both systems on the same files."
            )
        if lower[0].sum() <= 0:
            raise BadParameter("bootstrap.ratio needs a second mean above 0: leave it out.")
        low, high = self._ends(_ratios(upper, lower, self._drawn(len(upper[0]))))
        every = np.arange(len(upper[0]))[None]
        return Interval(float(_ratios(upper, lower, every)[0]), low, high)

    def _drawn(self, files: int) -> Int[ndarray, "resamples files"]:
        return np.random.default_rng(self.seed).integers(files, size=(self.resamples, files))

    def _ends(self, values: Means) -> tuple[float, float]:
        tail = (1 - self.coverage) / 2
        low, high = np.quantile(values, [tail, 1 - tail])
        return float(low), float(high)


def questions_as_clusters(scores: Sequence[float]) -> list[list[float]]:
    """Each question as a cluster of its own, to resample questions instead of files."""
    return [[score] for score in scores]


@lru_cache(maxsize=4096)
def _mean_interval(bootstrap: Bootstrap, files: tuple[tuple[float, ...], ...]) -> Interval:
    """Interval of a mean; cached, because tables and figures repeat the same ones."""
    sums, counts = _sums_and_counts(files)
    drawn = bootstrap._drawn(len(sums))
    low, high = bootstrap._ends(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return Interval(float(sums.sum() / counts.sum()), low, high)


def _ratios(upper: Summed, lower: Summed, drawn: Int[ndarray, "resamples files"]) -> Means:
    """Ratios of the two means, in the resamples where the second is above 0."""
    first, second = (
        sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1) for sums, counts in (upper, lower)
    )
    return first[second > 0] / second[second > 0]


def _sums_and_counts(files: Scores) -> Summed:
    # Files without questions are left out: a resample of such files alone has no mean.
    scored = [np.asarray(file, dtype=np.float64) for file in files if len(file)]
    if not scored:
        raise BadParameter("bootstrap needs at least one scored question, got none.")
    if not all(np.isfinite(file).all() for file in scored):
        raise BadParameter("bootstrap needs finite scores, got nan or inf: leave those out.")
    return np.array([file.sum() for file in scored]), np.array([file.size for file in scored])


def _shape(files: Scores) -> str:
    return f"{len(files)} files with {sum(len(file) for file in files)} questions"
