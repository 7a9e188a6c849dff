"""Commands say all that rows tell, and nothing of where somebody keeps folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.bench.rows import Results
from larder.bench.study import Study, TaskAt
from larder.plots import commands as module
from larder.plots.commands import commands
from plots_rows import cell


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study("known", (TaskAt("needles()", (1000,)),), files=2)
    monkeypatch.setattr(module, "study_names", lambda: ["known"])
    monkeypatch.setattr(module, "read_study", lambda name: study)


def measuring(**changes: object) -> str:
    rows = tuple(cell("h2o", seed=seed, **changes) for seed in (0, 1))
    return commands(Results(rows, {}), [Path("rows.jsonl")])[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"model": "org/name"}, " --model org/name"),
        ({"model": "/home/me/model"}, " --model MODEL_FOLDER"),
        ({"task": "requests(of='bookings()')"}, " --corpus FOLDER"),
        ({"task": 'needles(hay="prose")'}, " --corpus FOLDER"),
        ({"task": "mixed(of='planted()')"}, " --corpus FOLDER --data FOLDER"),
        ({"seed": 0}, " --files 1"),
    ],
)
def test_a_known_study_is_named_with_what_was_changed(
    changes: dict[str, object], said: str
) -> None:
    seeds = range(1 if changes.pop("seed", 1) == 0 else 2)
    rows = tuple(cell("h2o", seed=seed, study="known", **changes) for seed in seeds)
    [line, *_] = commands(Results(rows, {}), [Path("rows.jsonl")])
    assert line == f"larder bench --study known{said} --out rows.jsonl"


def test_another_is_spelled_out() -> None:
    assert measuring(model="./mine", task="locomo()") == (
        "larder bench 'locomo()' --tokens 1000 --files 2 --model MODEL_FOLDER --measure forced "
        "--matched bytes --budget 1/4 --policy h2o --control none --name small --data FOLDER "
        "--out rows.jsonl"
    )
