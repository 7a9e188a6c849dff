"""`random`: a mixed number from layer, head and position, in 64-bit arithmetic."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of, positions_of

SMALL = {"seed": 3}  # parameters for small layers


def draw(position: int, stream: int) -> float:
    """SplitMix64 of the position's place in the stream; the highest 24 bits."""
    start = stream * 0x94D049BB133111EB
    mixed = (start + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) % 2**64
    return ((mixed ^ (mixed >> 31)) >> 40) / 2**24


def scores(part: Any, observation: Observation) -> list[list[float]]:
    base = (part.seed * 1_000_003 + observation.layer.index) * 1_009
    return [
        [draw(position, base + head) for position in positions_of(observation.entries, head)]
        for head in heads_of(observation)
    ]
