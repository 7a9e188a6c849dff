"""What is measured about a model once and kept: `$LARDER_HOME/<fingerprint>/<name>.json`."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from larder.core.errors import ModelError
from larder.core.family import Family
from larder.core.observation import Calibration
from larder.core.settings import home
from larder.models.decoder import Decoder
from larder.models.measurements.base import Measurement, SampleText

SCHEMA = 1
MEASUREMENTS = Family("calibration", "larder.models.measurements")


def calibrate(
    decoder: Decoder, encode: Callable[[str], Sequence[int]], names: frozenset[str]
) -> Calibration:
    """Measurements by name, from the file beside the model's name or measured now.

    Args:
        encode: token ids of a text, for the sample that is read.

    Raises:
        UnknownName: nobody knows how to measure that.
        ModelError: the model cannot be measured so.
    """
    sample = SampleText(encode)
    return {name: _cached_measurement(decoder, sample, name) for name in sorted(names)}


def _cached_measurement(decoder: Decoder, sample: SampleText, name: str) -> tuple[float, ...]:
    measurement: Measurement = MEASUREMENTS.load(name)()
    count = _expected_count(decoder, measurement, name)
    path, profile = home() / decoder.spec.fingerprint / f"{name}.json", _profile(measurement)
    known = _load_values(path, profile, count)
    if known is not None:
        return known
    values = measurement.measure(decoder, sample)
    if len(values) != count or not all(map(math.isfinite, values)):
        raise ModelError(
            f"Measuring {name!r} gave {len(values)} numbers where {count} finite ones are needed: "
            "this model cannot be calibrated so, take a part that does without."
        )
    _save_values(path, profile, values)
    return values


def _expected_count(decoder: Decoder, measurement: Measurement, name: str) -> int:
    """How many numbers there must be.

    Raises:
        ModelError: layers differ in heads, so that numbers per head cannot be told apart by layer.
    """
    counts = [measurement.granularity.count(layer) for layer in decoder.spec.managed]
    if len(set(counts)) > 1:
        raise ModelError(
            f"The calibration {name!r} has a number for each {measurement.granularity.value}, of "
            "which "
            f"this model's layers have {counts}: take a part that does without."
        )
    return sum(counts)


def _profile(measurement: Measurement) -> dict[str, Any]:
    """What it was measured with."""
    return asdict(measurement)  # pyright: ignore


def _load_values(path: Path, profile: dict[str, Any], count: int) -> tuple[float, ...] | None:
    """What the file says, if it was measured with the same profile; a damaged file is no file."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        values = tuple(float(value) for value in kept["values"])
        whole = len(values) == count and all(map(math.isfinite, values))
        if whole and kept["schema"] == SCHEMA and kept["profile"] == profile:
            return values
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _save_values(path: Path, profile: dict[str, Any], values: tuple[float, ...]) -> None:
    """Write whole or not at all; a home that cannot be written costs only the next measurement."""
    told = {"schema": SCHEMA, "profile": profile, "values": values}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".draft")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(told, file)
        os.replace(draft, path)
    except OSError:
        return
