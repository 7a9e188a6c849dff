"""Commands contain everything that rows have, and no local paths."""

from __future__ import annotations

import shlex
from itertools import pairwise, product, takewhile
from pathlib import Path

import pytest

from larder_bench.plots import rerun_commands as module
from larder_bench.plots.rerun_commands import rerun_commands
from larder_bench.results.rows import Results, read_results
from larder_bench.studies.study import Study, StudyTask
from result_rows import cell, write_rows


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tuple(StudyTask(f"{name}()", (1000,)) for name in ("needles", "requests", "mixed"))
    study = Study("known", tasks, files=2)
    monkeypatch.setattr(module, "study_names", lambda: ["known"])
    monkeypatch.setattr(module, "read_study", lambda name: study)


def rerun_command(**changes: object) -> str:
    rows = tuple(cell("h2o", seed=seed, **changes) for seed in (0, 1))
    return rerun_commands(Results(rows, {}), [Path("rows.jsonl")])[0]


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ({}, ""),
        ({"model": "org/name"}, " --model org/name"),
        ({"model": "/home/me/model"}, " --model MODEL_FOLDER"),
        ({"task": "requests(of='bookings()')"}, " --corpus FOLDER"),
        ({"task": 'needles(hay="prose")'}, " --corpus FOLDER"),
        ({"task": "mixed(of='planted()')"}, " --corpus FOLDER --data FOLDER"),
        ({"task": "requests(of='longbench_v2()')"}, " --data FOLDER"),
        ({"seed": 0}, " --files 1"),
    ],
)
def test_rerun_command_names_the_study_and_its_changes(
    changes: dict[str, object], cells: str
) -> None:
    seeds = range(1 if changes.pop("seed", 1) == 0 else 2)
    rows = tuple(cell("h2o", seed=seed, study="known", **changes) for seed in seeds)
    [line, *_] = rerun_commands(Results(rows, {}), [Path("rows.jsonl")])
    assert line == f"larder bench --study known{cells} --out rows.jsonl"


def test_non_default_options_are_named() -> None:
    assert rerun_command(device="cuda", dtype="bfloat16").endswith(
        "--control none --device cuda --name small --out rows.jsonl"
    )
    rows = [
        cell("h2o", seed=seed, study="known", device="cuda", dtype="float16") for seed in (0, 1)
    ]
    lines = rerun_commands(Results((*rows, cell("h2o", study="known")), {}), [Path("rows.jsonl")])
    assert lines[:2] == [
        "larder bench --study known --device cuda --dtype float16 --out rows.jsonl",
        "larder bench --study known --files 1 --out rows.jsonl",
    ]


def test_rows_that_a_study_does_not_have_are_spelled_out() -> None:
    for other in ({"task": "passkey()"}, {"tokens": 2000}, {"matched": "total"}, {"budget": "1/2"}):
        row = cell("h2o", study="known") | other
        [line, *_] = rerun_commands(Results((row,), {}), [Path("rows.jsonl")])
        assert "--study" not in line and "--name known" in line


def cells_of_command(line: str) -> set[tuple[str, ...]]:
    """All cells that a command measures."""
    words = shlex.split(line)
    tasks = list(takewhile(lambda word: not word.startswith("--"), words[2:]))
    options: dict[str, list[str]] = {}
    for option, value in pairwise(words):
        if option.startswith("--"):
            options.setdefault(option, []).append(value)
    first = int(options.get("--first-seed", ["0"])[0])
    seeds = [str(first + number) for number in range(int(options["--files"][0]))]
    tokens = options["--tokens"][0].split(",")
    named = [*options.get("--policy", []), *options["--control"]]
    return {
        (*place, name, "1/1" if name == "full" else budget)
        for place in product(tasks, tokens, seeds, options["--matched"])
        for name in named
        for budget in options.get("--budget", ["1/1"])
        if name != "none"
    }


def test_commands_of_two_runs_cover_their_cells_only() -> None:
    first = product(
        ("a()", "b()"), (100, 200), (0, 1), ("bytes", "tokens"), ("h2o", "full"), ("1/4",)
    )
    second = product(("c()",), (400,), (3, 4, 6), ("bytes",), ("h2o", "d2o"), ("1/4", "1/8"))
    third = product(("d()",), (50,), (0,), ("bytes",), ("full",), ("1/4",))
    rows = [
        cell(policy, seed=seed)
        | {"task": task, "tokens": tokens, "matched": matched}
        | {"budget": "1/1" if policy == "full" else budget}
        for task, tokens, seed, matched, policy, budget in (*first, *second, *third)
    ]
    lines = rerun_commands(Results(tuple(rows[::-1]), {}), [Path("rows.jsonl")])[:-2]
    names = ("task", "tokens", "seed", "matched", "policy", "budget")
    assert len(lines) == 4
    cells = [cells_of_command(line) for line in lines]
    assert set.union(*cells) == {tuple(str(row[name]) for name in names) for row in rows}
    assert sum(map(len, cells)) == len(rows)


def test_each_study_has_its_own_file(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / name, [cell("h2o", study=name)]) for name in ("one", "two")]
    lines = rerun_commands(read_results(paths), paths)
    for line, path in zip(lines[:2], paths, strict=True):
        assert line.endswith(f"--name {path.parent.name} --out {path}")
    assert lines[2] == f"larder plot {paths[0]} {paths[1]}"


def test_unknown_study_is_spelled_out_without_local_paths() -> None:
    assert rerun_command(model="./mine", task="locomo()") == (
        "larder bench 'locomo()' --tokens 1000 --files 2 --model MODEL_FOLDER --measure forced "
        "--matched bytes --budget 1/4 --policy h2o --control none --wording seed --name small "
        "--data FOLDER --out rows.jsonl"
    )


def test_external_measurements_keep_their_command() -> None:
    rows = (cell("snapkv", command="python peers.py"), cell("h2o", command="python peers.py"))
    lines = rerun_commands(Results(rows, {}), [Path("rows.jsonl")])
    assert lines[0] == "python peers.py"
    assert lines[1].startswith("larder plot")
