"""`reconstruct`: the highest weight within the repeated chunk; other entries are not judged."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of, highest, highest_in_plain_attention, positions_of

SMALL = {"chunk": 7}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    start, stop = observation.span
    out = []
    for head in heads_of(observation):
        positions = positions_of(observation.entries, head)
        judged = [start <= position < stop for position in positions]
        if part.variant.value == "larder":
            row = highest(observation, head, judged)
        else:
            shared = [j or p < part.opening for j, p in zip(judged, positions, strict=True)]
            row = highest_in_plain_attention(observation, head, shared)
        out.append([w if see else -math.inf for w, see in zip(row, judged, strict=True)])
    return out


def repeats(part: Any, block: list[int], request: list[int]) -> list[tuple[list[int], int, int]]:
    """Tokens, first and last position of every request of `paper` and `code`."""
    out = []
    for first in range(0, len(block), part.chunk):
        quote = block[:first][-8:]
        chunk = block[first : first + part.chunk]
        out.append((request + quote + chunk, first, first + len(chunk)))
    return out
