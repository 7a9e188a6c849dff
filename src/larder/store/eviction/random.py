"""Random eviction, a baseline.

No paper. The draw depends on the candidate, the time and the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from larder.store.eviction.base import CandidateColumns, EvictionPolicy, FloatColumn

# Constants of the mixing function SplitMix64 (Steele, Lea and Flood, 2014); products wrap.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class RandomEviction(EvictionPolicy):
    """Uniform random worth of each candidate.

    Args:
        seed: seed of the draw.
    """

    seed: int = 0

    def worth(self, candidates: CandidateColumns, now: float) -> FloatColumn:
        draw = int(np.float64(now).view(np.uint64)) + self.seed * _GOLDEN
        start = np.uint64(int(_splitmix64(np.array([draw & _MASK], np.uint64))[0]))
        mixed = _splitmix64(candidates.codes.astype(np.uint64) * np.uint64(_GOLDEN) + start)
        return (mixed >> np.uint64(11)).astype(np.float64) / (1 << 53)


def _splitmix64(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> _SHIFTS[0])) * _MIX_1
    words = (words ^ (words >> _SHIFTS[1])) * _MIX_2
    return words ^ (words >> _SHIFTS[2])


Part = RandomEviction
