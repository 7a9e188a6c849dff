"""Calibration of a model: measurements made once, cached in `$LARDER_HOME/<fingerprint>/`.

One file `<name>.json` per measurement, and a file of tensors beside it for some; a file made with
other parameters is measured again. Numbers of models that `larder model list` names come with the
package, for those that take long to measure (`calibrations.json`, tensors in `calibrated/`), found
by fingerprint, too; what was measured here goes before them.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from larder.core.errors import ModelError
from larder.core.home import home
from larder.core.observation import Calibration
from larder.core.progress import Progress, no_progress
from larder.core.registry import Family
from larder.models.decoder import Decoder
from larder.models.measurements.base import Measurement, SampleText

SCHEMA = 1
PACKAGED_FILE = "calibrations.json"
MEASUREMENTS = Family("calibration", "larder.models.measurements")


def calibrate(
    decoder: Decoder,
    encode: Callable[[str], Sequence[int]],
    names: frozenset[str],
    progress: Progress = no_progress,
) -> Calibration:
    """Values of each measurement by name, from its file or measured now.

    Args:
        encode: tokenizer for the sample text.
        progress: receives the percentage that is done, and 100.

    Raises:
        UnknownName: there is no such measurement.
        ModelError: the measurement does not apply to this model.
    """
    values = dict[str, tuple[float, ...]]()

    def report(done: int, total: int) -> None:
        progress(int(100 * (len(values) + done / total) / len(names)), 100)

    sample = SampleText(encode, report)
    for name in sorted(names):
        report(0, 1)
        values[name] = _cached_measurement(decoder, sample, name)
    return values


@dataclass(frozen=True)
class CalibrationOutcome:
    """Measurement of a model by `calibrate_each`.

    Args:
        numbers: count of its numbers; 0 if it was refused.
        seconds: duration, almost 0 if the numbers were cached.
        is_cached: whether the numbers were cached before.
        refusal: why the measurement does not apply to the model; else empty.
    """

    name: str
    numbers: int
    seconds: float
    is_cached: bool
    refusal: str = ""


def calibrate_each(
    decoder: Decoder, encode: Callable[[str], Sequence[int]], names: Sequence[str]
) -> Iterator[CalibrationOutcome]:
    """Measure or load each calibration in turn, with its cost.

    Raises:
        UnknownName: there is no such measurement.
    """
    # One measurement may need another, which it makes and caches.
    cached = {name for name in names if _is_cached(decoder, name)}
    sample = SampleText(encode)
    for name in names:
        yield _outcome(name, name in cached, partial(_cached_measurement, decoder, sample, name))


def measure_each(
    decoder: Decoder, encode: Callable[[str], Sequence[int]], names: Sequence[str]
) -> Iterator[CalibrationOutcome]:
    """Measure each calibration in turn, in place of what was measured before or is packaged.

    Raises:
        UnknownName: there is no such measurement.
    """
    sample = SampleText(encode)
    for name in names:
        yield _outcome(name, False, partial(_new_measurement, decoder, sample, name))


def known_numbers(fingerprint: str, name: str) -> tuple[float, ...]:
    """Numbers of a measurement that was made of a model before, or is packaged; empty if neither.

    Those that were made with other parameters count, too. Nothing is measured or loaded.
    """
    document = _document(home() / fingerprint / f"{name}.json")
    if values := _finite(document.get("values")):
        return values
    rows = (row for row in _packaged()["measured"] if row["fingerprint"] == fingerprint)
    return next((tuple(row["values"]) for row in rows if row["name"] == name), ())


def with_companions(names: Sequence[str]) -> tuple[str, ...]:
    """Measurements with those that are made beside them, each once."""
    pairs = [(name, *MEASUREMENTS.load(name)().companions) for name in names]
    return tuple(dict.fromkeys(name for pair in pairs for name in pair))


def _outcome(
    name: str, is_cached: bool, values: Callable[[], tuple[float, ...]]
) -> CalibrationOutcome:
    started = time.perf_counter()
    try:
        numbers, refusal = len(values()), ""
    except ModelError as error:
        numbers, refusal = 0, str(error)
    return CalibrationOutcome(name, numbers, time.perf_counter() - started, is_cached, refusal)


def _calibration_file(decoder: Decoder, name: str) -> Path:
    return home() / decoder.spec.fingerprint / f"{name}.json"


def _is_cached(decoder: Decoder, name: str) -> bool:
    """Test if the files of a measurement exist and are of this model and these parameters."""
    measurement: Measurement = MEASUREMENTS.load(name)()
    try:
        count = _expected_count(decoder, measurement, name)
    except ModelError:
        return False
    return _cached_values(decoder, measurement, name, count) is not None


def _cached_values(
    decoder: Decoder, measurement: Measurement, name: str, count: int
) -> tuple[float, ...] | None:
    """Values of a measurement from its files; None if it must be made."""
    path, profile = _calibration_file(decoder, name), asdict(measurement)  # pyright: ignore
    if not measurement.has_cache:
        return None
    values = _load_values(path, profile, count) if measurement.has_files(path.parent) else None
    if values is None and measurement.takes_packaged(path.parent):
        return _packaged_values(decoder.spec.fingerprint, name, profile, count)
    return values


def _cached_measurement(decoder: Decoder, sample: SampleText, name: str) -> tuple[float, ...]:
    measurement: Measurement = MEASUREMENTS.load(name)()
    count = _expected_count(decoder, measurement, name)
    known = _cached_values(decoder, measurement, name, count)
    if known is not None:
        return known
    if damaged := measurement.damaged_file(_calibration_file(decoder, name).parent):
        warnings.warn(f"{damaged} is damaged and is measured again.", RuntimeWarning, stacklevel=2)
    return _new_measurement(decoder, sample, name)


def _new_measurement(decoder: Decoder, sample: SampleText, name: str) -> tuple[float, ...]:
    """Values of a measurement made now, and saved in its files."""
    measurement: Measurement = MEASUREMENTS.load(name)()
    count = _expected_count(decoder, measurement, name)
    path, profile = _calibration_file(decoder, name), asdict(measurement)  # pyright: ignore
    values = measurement.measure_into(path.parent, decoder, sample)
    if len(values) != count or not all(map(math.isfinite, values)):
        raise ModelError(
            f"Measuring {name!r} gave {len(values)} numbers where {count} finite ones are needed: "
            "this model cannot be calibrated so, choose a part without this calibration."
        )
    if measurement.has_cache:
        _save_values(path, profile, values)
    return values


def _expected_count(decoder: Decoder, measurement: Measurement, name: str) -> int:
    """Count of numbers that the measurement must give.

    Raises:
        ModelError: layers differ in heads, so that numbers per head cannot be split by layer.
    """
    counts = [measurement.granularity.count(layer) for layer in decoder.spec.managed]
    if len(set(counts)) > 1:
        raise ModelError(
            f"The calibration {name!r} has a number for each {measurement.granularity.value}, of "
            f"which this model's layers have {counts}: choose a part without this calibration."
        )
    return sum(counts)


def _load_values(path: Path, profile: dict[str, Any], count: int) -> tuple[float, ...] | None:
    """Values of the file; None if it is missing, damaged or made with other parameters."""
    document = _document(path)
    values, made = _finite(document.get("values")), document.get("profile")
    return values if len(values) == count and made == profile else None


def _document(path: Path) -> dict[str, Any]:
    """Document of a file of this schema; empty if it is missing or damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_known = isinstance(document, dict) and document.get("schema") == SCHEMA
    return document if is_known else {}


def _finite(values: Any) -> tuple[float, ...]:
    """Numbers of a list; empty if it is no list of finite ones."""
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        return ()
    return numbers if all(map(math.isfinite, numbers)) else ()


def _packaged_values(
    fingerprint: str, name: str, profile: dict[str, Any], count: int
) -> tuple[float, ...] | None:
    """Values that come with the package; None if there are none of this model and parameters."""
    for each in _packaged()["measured"]:
        if (each["fingerprint"], each["name"]) == (fingerprint, name):
            is_same = each["profile"] == profile and len(each["values"]) == count
            return tuple(each["values"]) if is_same else None
    return None


def _packaged() -> dict[str, Any]:
    """Document of the values that come with the package."""
    return json.loads((files("larder.models") / PACKAGED_FILE).read_text(encoding="utf-8"))


def _save_values(path: Path, profile: dict[str, Any], values: tuple[float, ...]) -> None:
    """Write the file atomically; if the folder is not writable, the next run measures again."""
    document = {"schema": SCHEMA, "profile": profile, "values": values}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".draft")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(draft, path)
    except OSError:
        return
