"""A way to run commands in this process, with a bundled model that is loaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import cli_results
from cli_results import Run
from larder.cli import question_run
from larder.cli.main import app
from larder.models import SEED, LoadedModel, load


@pytest.fixture(autouse=True)
def calibrated(measured_once: None) -> None:
    """The bundled model is measured once."""


@pytest.fixture
def run(seed_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line; the bundled model is not loaded again each time."""

    def loaded(name: str, dtype: str | None, adapter: str | None, **options: Any) -> LoadedModel:
        if name == SEED and adapter is None:
            return seed_model
        return load(name, dtype=dtype, adapter=adapter, **options)

    monkeypatch.setattr(question_run, "load", loaded)

    def invoke(*words: str | Path, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words], input=stdin)

    return invoke


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    return cli_results.talk(tmp_path / "talk.json")
