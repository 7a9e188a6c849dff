"""Measurements are kept beside the model's name, and refused where they do not fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from larder.core import ModelError
from larder.models import MEASUREMENTS, SqueezeMeasurement, calibrate, calibration
from measurements import SMALL, encode


@pytest.fixture
def small(monkeypatch):
    """Measurements small enough for tests, by the names of their files."""
    load = MEASUREMENTS.load
    monkeypatch.setattr(
        type(MEASUREMENTS),
        "load",
        lambda self, name: (lambda: SMALL[name]) if name in SMALL else load(name),
    )


def test_calibration_is_cached(three_layers, small, larder_home, monkeypatch) -> None:
    names = frozenset({"retrieval", "squeeze"})
    first = calibrate(three_layers, encode, names)
    assert [len(first[name]) for name in ("retrieval", "squeeze")] == [12, 3]
    path = larder_home / three_layers.spec.fingerprint / "retrieval.json"
    result = json.loads(path.read_text())
    assert result["profile"] == {"needles": {"tokens": 40, "count": 2, "words": 1}}
    result["values"][0] = 0.25
    path.write_text(json.dumps(result))
    assert calibrate(three_layers, encode, names)["retrieval"][0] == 0.25
    result["values"] = result["values"][:4]
    path.write_text(json.dumps(result))
    assert calibrate(three_layers, encode, names) == first


def test_measurement_of_wrong_length_is_refused(three_layers, small, monkeypatch) -> None:
    for wrong in ((0.5,) * 4, (math.nan,) * 3):
        monkeypatch.setattr(SqueezeMeasurement, "measure", lambda self, d, s, wrong=wrong: wrong)
        with pytest.raises(ModelError, match=r"'squeeze' gave \d numbers where 3 finite ones"):
            calibrate(three_layers, encode, frozenset({"squeeze"}))


def test_uneven_head_counts_are_refused(three_layers, small, monkeypatch) -> None:
    layers = three_layers.spec.layers
    uneven = replace(three_layers.spec, layers=(replace(layers[0], kv_heads=4), *layers[1:]))
    monkeypatch.setattr(three_layers, "spec", uneven)
    with pytest.raises(ModelError, match=r"each kv_head, of which this model's layers have \[4, 2"):
        calibrate(three_layers, encode, frozenset({"echo"}))
    assert calibration._expected_count(three_layers, SMALL["squeeze"], "squeeze") == 3
