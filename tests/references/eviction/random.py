"""`random`: SplitMix64 in whole numbers, of the time first and then of the candidate."""

from __future__ import annotations

import struct
from typing import Any

from larder.store import Candidate, CandidateColumns

ALL = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15


def worths(part: Any, candidates: list[Candidate], now: float) -> list[float]:
    (bits,) = struct.unpack("<Q", struct.pack("<d", now))
    start = mixed((bits + part.seed * GOLDEN) % ALL)
    codes = CandidateColumns.of(candidates).codes.tolist()
    return [(mixed((code * GOLDEN + start) % ALL) >> 11) / 2**53 for code in codes]


def mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % ALL
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % ALL
    return word ^ (word >> 31)
