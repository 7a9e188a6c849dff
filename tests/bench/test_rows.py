"""Rows are read back as written; an incomplete line is not a row and is removed before
appending.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import larder
from larder.core import InputError
from larder_bench.execution.resumable_run import ResumableRun
from larder_bench.results import environment
from larder_bench.results.environment import KERNEL_SOURCES, checkout_commit, environment_row
from larder_bench.results.rows import (
    CONDITION_KEYS,
    EXHIBITS_KEY,
    append_rows,
    cell_key,
    existing_rows,
    read_results,
    read_rows,
    split_exhibits,
    without_timings,
)

CELL: dict[str, Any] = {
    "schema": 1,
    "row": "cell",
    "study": "tiny",
    "environment": "0" * 12,
    "model": "seed",
    "model_fingerprint": "f",
    "task": "needles()",
    "tokens": 100,
    "seed": 3,
    "policy": "snapkv",
    "spelling": "whole()",
    "budget": "1/4",
    "matched": "bytes",
    "measure": "forced",
    "device": "cpu",
    "dtype": "float32",
    "question": "after",
    "wording": "seed",
    "prefill_seconds": 0.5,
    "seconds": 1.0,
    "items": [],
}


def test_rows_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    assert existing_rows(path) == []
    append_rows(path, [CELL])
    append_rows(path, [CELL | {"seed": 4}, CELL | {"seed": 5}])
    assert [row["seed"] for row in read_rows(path)] == [3, 4, 5]


def test_partial_line_is_removed_before_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_rows(path, [CELL])
    with path.open("a") as file:
        file.write(json.dumps(CELL | {"seed": 4})[:30])
    assert [row["seed"] for row in read_rows(path)] == [3]
    append_rows(path, [CELL | {"seed": 5}])
    assert [row["seed"] for row in read_rows(path)] == [3, 5]


def test_figure_only_rows_are_no_cells(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    left = [name for name in CELL if name != "model_fingerprint"]
    shown = {name: CELL[name] for name in left} | {"row": "budgets", "episode": 0}
    append_rows(path, [CELL, shown])
    run = ResumableRun(
        [3, 4], lambda seed: CELL | {"seed": seed}, cell_key, lambda seed: {}, path, {}
    )
    assert run.remaining() == [4]


def test_exhibits_record_how_they_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    part = {"row": "breakdown", "step": "step", "parts": []}
    for matched in ("bytes", "tokens"):
        append_rows(path, split_exhibits(CELL | {"matched": matched, EXHIBITS_KEY: [part]}))
    old = {n: v for n, v in read_rows(path)[0].items() if n not in CONDITION_KEYS}
    append_rows(path, [old, read_rows(path)[0]])
    found = read_results([path]).exhibits_of("breakdown")
    assert [row.get("matched") for row in found] == ["bytes", "tokens", None]
    assert all(row["device"] == "cpu" and row["measure"] == "forced" for row in found[:2])


def test_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"b":\n{"c": 2}\n')
    with pytest.raises(InputError, match="rows.jsonl"):
        read_rows(path)


def test_last_row_of_a_key_counts_and_environments_resolve_by_id(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    around = environment_row(threads=1)
    later = CELL | {"environment": around["id"], "seconds": 2.0}
    append_rows(path, [around, CELL, CELL | {"seed": 9, "refused": "too small"}, later])
    found = read_results([path])
    assert found.cells == (later, CELL | {"seed": 9, "refused": "too small"})
    assert found.measured == (later,)
    assert found.environments[found.cells[0]["environment"]] == around


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"file": "a", "policy": "h2o"}\n')
    with pytest.raises(InputError, match="schema 1"):
        read_results([path])


def test_cell_key_has_inputs_only() -> None:
    assert cell_key(CELL) == cell_key(CELL | {"seconds": 9, "items": [1], "policy": "another name"})
    for name in (
        "study",
        "model_fingerprint",
        "task",
        "spelling",
        "budget",
        "matched",
        "measure",
        "dtype",
    ):
        assert cell_key(CELL) != cell_key(CELL | {name: "other"})
    assert without_timings(CELL) == {
        name: value for name, value in CELL.items() if name not in ("seconds", "prefill_seconds")
    }


LATER = ("device", "dtype", "question", "wording")  # fields that early rows lack


def test_rows_without_a_device_are_recognized(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    old = {name: value for name, value in CELL.items() if name not in LATER}
    append_rows(path, [old])
    assert cell_key(old) == cell_key(CELL) and read_results([path]).cells == (CELL,)
    run = ResumableRun([CELL, CELL | {"device": "cuda"}], dict, cell_key, lambda row: {}, path, {})
    assert run.remaining() == [CELL | {"device": "cuda"}]


def test_kernels_are_named_with_the_rows_that_they_multiply_of_each_type(monkeypatch) -> None:
    kinds = set[str]()
    for wide, narrow in ((64, 64), (64, 16), (16, 16)):
        rows = {torch.float32: wide, torch.bfloat16: narrow}
        monkeypatch.setattr("larder.ops.max_rows", rows.__getitem__)
        kinds.add(environment.kernels_kind.__wrapped__())
    assert len(kinds) == 3


def test_equal_environments_have_equal_ids() -> None:
    one, other = environment_row(threads=1), environment_row(threads=1)
    assert one["id"] == other["id"] != environment_row(threads=2)["id"]
    assert (
        environment_row(1, "gpu")["accelerator"] == "gpu"
        and environment_row(1, "gpu")["id"] != one["id"]
    )
    assert len(one["id"]) == 12
    assert one["larder"] and one["torch"] and one["transformers"]


def test_no_torch_is_needed() -> None:
    asked = "import sys, larder_bench.results.rows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_modified_checkout_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.py"
    monkeypatch.setattr(environment, "__file__", str(file))
    assert checkout_commit() == ""
    file.write_text("one\n")
    who = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "One")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    commit = checkout_commit()
    assert len(commit) >= 7 and "-" not in commit
    (tmp_path / "results.jsonl").write_text("{}\n")
    assert checkout_commit() == commit
    file.write_text("two\n")
    assert checkout_commit() == f"{commit}-dirty"


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_compressed_rows_are_appended_and_survive_a_stop(tmp_path: Path, cut: int) -> None:
    plain, packed = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.zst"
    first, second = CELL, CELL | {"seed": 9}
    for path in (plain, packed):
        append_rows(path, [first])
        append_rows(path, [second])
    assert read_rows(packed) == read_rows(plain) == [first, second]
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) - cut])
    kept = [first, second][: 1 if cut else 2]
    assert read_rows(packed) == kept
    append_rows(packed, [second])
    assert read_rows(packed) == [*kept, second]
    assert read_results([tmp_path]).cells == (first, second)


def test_kernel_sources_exist() -> None:
    package = Path(larder.__file__).parent
    assert [pattern for pattern in KERNEL_SOURCES if not any(package.glob(pattern))] == []
