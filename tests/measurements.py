"""Measurements small enough for tests, and a text for them."""

from __future__ import annotations

from collections.abc import Sequence

from larder.core import Calibration, LayerSpec
from larder.models import (
    MEASUREMENTS,
    Echo,
    EvictionErrorMeasurement,
    Induction,
    NeedleRank,
    NeedleSettings,
    Reasoning,
    Reconstruction,
    RetrievalMeasurement,
    SampleText,
    SqueezeMeasurement,
    StreamingError,
    Utility,
)

SMALL_NEEDLES = NeedleSettings(tokens=40, count=2, words=1)
SMALL = {
    "echo": Echo(tokens=9, times=3),
    "induction": Induction(tokens=9, times=3),
    "retrieval": RetrievalMeasurement(SMALL_NEEDLES),
    "needle_rank": NeedleRank(SMALL_NEEDLES),
    "reasoning": Reasoning(lengths=(20, 30), depths=(0.5, 0.9)),
    "streaming_error": StreamingError(sinks=3, recent=20, needles=SMALL_NEEDLES),
    "eviction_error": EvictionErrorMeasurement(context=40, kept=9, window=4, following=7),
    "reconstruction": Reconstruction(tokens=12, sinks=6),
    "squeeze": SqueezeMeasurement(tokens=30),
    "utility": Utility(context=40, following=9),
}


def encode(text: str) -> list[int]:
    return [3 + ord(letter) % 100 for letter in text]


SAMPLE = SampleText(encode)


def made_up(layers: Sequence[LayerSpec]) -> Calibration:
    """Every measurement that there is, for some managed layers, each number in [0.1, 0.9]."""
    facts: dict[str, tuple[float, ...]] = {}
    for number, name in enumerate(MEASUREMENTS.names()):
        count = sum(MEASUREMENTS.load(name).granularity.count(layer) for layer in layers)
        facts[name] = tuple(0.1 + (5 * at + 3 * number) % 9 / 10 for at in range(count))
    return facts
