"""`larder bench`: a study from arguments, its rows in a file, its errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_results import Run, complaint, document, write
from larder.core import MissingWeights
from larder_bench.cli import check
from larder_bench.cli.bench import BenchOptions
from larder_bench.execution.committed_rows import CheckedCell, PlannedCheck
from larder_bench.execution.resumable_run import ResumableRun as Running
from larder_bench.execution.row_comparison import Deviation, Rounding
from larder_bench.execution.runner import MEASURES
from larder_bench.results.rows import read_rows

TINY = ("--model", "random:qwen3-tiny", "--tokens", "180", "--files", "1", "--budget", "1/2")
ONE = ("bench", "passkey", *TINY, "--policy", "h2o", "--control", "full", "--matched", "bytes")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_task_from_arguments_is_measured_and_tabulated_once(run: Run, out: Path) -> None:
    result = run(*ONE, "--out", out, "--json")
    reply = document(result)
    assert result.exit_code == 0
    assert (reply["study"], reply["cells"], reply["refused"]) == ("bench", 2, 0)
    [group] = reply["groups"]
    assert (group["task"], group["tokens"], group["measure"]) == ("passkey()", 180, "forced") or (
        group["task"].startswith("passkey(")
    )
    h2o, full = group["results"]
    assert (h2o["policy"], full["policy"]) == ("h2o", "full")
    assert h2o["bytes_share"] <= 0.5 < full["bytes_share"]
    assert {"mean", "low", "high"} == set(h2o["exact"]) and h2o["kv_bytes"] < full["kv_bytes"]
    assert [row["row"] for row in read_rows(out)] == ["environment", "budgets", "cell", "cell"]
    assert len(result.stderr.splitlines()) == 2 and "h2o 1/2" in result.stderr
    again = run(*ONE, "--out", out)
    assert again.stderr == "" and "### Exact match" in again.stdout and "| h2o |" in again.stdout
    assert len(read_rows(out)) == 4 and "of other runs" not in again.stdout
    other = run(*ONE[:-6], "--control", "full", "--matched", "bytes", "--out", out)
    assert "| full |" in other.stdout and "h2o" not in other.stdout
    assert other.stdout.splitlines()[-1].startswith(f"{out} holds 1 cell of other runs: ")


@pytest.mark.extended
def test_study_file_defines_the_run(run: Run, tmp_path: Path, out: Path) -> None:
    text = 'name = "own"\npolicies = ["h2o"]\ncontrols = ["full"]\nbudgets = ["64"]\nfiles = 3\n'
    path = write(tmp_path / "own.toml", text + '[[tasks]]\nspelling = "passkey"\ntokens = 180\n')
    words = ("bench", "--study", path, "--out", out, "--model", "random:qwen3-tiny")
    result = document(run(*words, "--files", "1", "--estimate", "--json"))
    assert result["cells"] == 4 and {part["policy"] for part in result["parts"]} == {"h2o", "full"}
    assert not out.exists()
    line = complaint(run(*words, "--policy", "snapkv"), 2)
    assert "contradicts" in line and "--policy" in line
    others = ("lookup(questions=1)", "--tokens", "300", "--budget", "32", "--measure", "generated")
    result = document(run(*words, *others, "--files", "1", "--estimate", "--json"))
    assert {(p["task"].partition("(")[0], p["tokens"], p["measure"]) for p in result["parts"]} == {
        ("lookup", 300, "generated")
    }
    result = document(run(*words, "--tokens", "190,200", "--files", "1", "--estimate", "--json"))
    assert [part["tokens"] for part in result["parts"]] == [190, 190, 200, 200]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "Tasks: "),
        (("paskey",), 2, "Did you mean 'passkey'"),
        (("passkey", "--tokens", "many"), 2, "--tokens 1500,4000"),
        (("passkey", "--tokens", ""), 2, "--tokens 1500,4000"),
        (("passkey", "--budget", "2/1"), 2, "above 0"),
        (("passkey", *TINY, "--control", "full", "--device", "xpu"), 1, "cannot be used: "),
        (("passkey", "--measure", "fored"), 2, "Did you mean 'forced'"),
        (("passkey", "--study", "none_such"), 2, "No study named"),
        (("--study", "none_such"), 2, "No study named"),
        (("--study", "none_such.toml"), 1, "name a file, or one of the studies "),
        (("bookings", *TINY, "--control", "full", "--estimate"), 2, "--corpus FOLDER"),
        (("bookings", *TINY, "--control", "full"), 2, "--corpus FOLDER"),
    ],
)
def test_invalid_arguments_are_refused_without_a_results_file(
    run: Run, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    line = complaint(run("bench", *words, "--out", tmp_path / "none.jsonl"), code)
    assert message in line
    assert not (tmp_path / "none.jsonl").exists()


def test_interrupted_study_keeps_its_measured_cells(
    run: Run, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all = Running.run

    def stopped(self: Running, on_row: object) -> None:
        def then_stop(row: object, progress: object) -> None:
            raise KeyboardInterrupt

        run_all(self, then_stop)

    monkeypatch.setattr(Running, "run", stopped)
    result = run(*ONE, "--out", out, "--json")
    assert (result.exit_code, document(result)["cells"]) == (130, 1)
    assert "Stopped at 1 of 2 cells: the same command continues" in result.stderr
    assert [row["row"] for row in read_rows(out)][1:] == ["budgets", "cell"]
    interrupt = lambda self, on_row: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
    monkeypatch.setattr(Running, "run", interrupt)
    assert run(*ONE, "--out", out.with_name("other.jsonl")).exit_code == 130


def test_help_names_every_measure() -> None:
    result = BenchOptions.__annotations__["measure"]
    assert all(name in result for name in MEASURES.builtin_names())


def test_missing_rows_are_skipped_with_the_reason(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "RESULTS", tmp_path)
    result = run("bench", "--check", "--study", "recital")
    assert result.exit_code == 1 and result.stdout.startswith("recital: skipped: ")


def test_checks_of_many_studies_end_with_a_summary(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst = Deviation("kl", 0.2, 0.25, 0.1)
    checked = {
        "near": CheckedCell({}, (), Rounding.OTHER, largest=worst),
        "far": CheckedCell({}, ("budget: 1 committed, 2 measured",)),
    }
    found = [check.StudyCheck(name, "cell", 2.0, 3.5, one) for name, one in checked.items()]
    monkeypatch.setattr(check, "_measured_studies", lambda _: iter(["near", "far", "gone"]))
    gone = check.StudyCheck("gone", "", 0.0, skipped="no model")
    monkeypatch.setattr(check, "_checks", lambda *_: iter([*found, gone]))
    result = run("bench", "--check")
    assert result.exit_code == 1
    *_, totals, last = result.stdout.splitlines()
    assert totals.startswith("2 of 3 studies compared, 1 differ; 0 s, 7 s of the processor.")
    assert last == (
        "Largest difference: near, kl 0.2 committed, 0.25 measured, 50% of what is allowed."
    )
    assert "near (cell): equal, 2 s, 3.5 s of the processor" in result.stdout
    assert "gone: skipped: no model" in result.stdout


def test_studies_of_one_model_can_be_checked_alone() -> None:
    names = set(check._measured_studies(None))
    of_gemma = set(check._measured_studies(["gemma3-270m"]))
    assert of_gemma == {"divergence_gemma", "memory_gemma"} < names


def test_check_of_a_task_is_refused(run: Run) -> None:
    assert "name a study, no task" in complaint(run("bench", "--check", "needles"), 2)


def test_policies_without_weights_are_named_and_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next policy is measured in their place."""
    measured = list[str]()

    def checked(planned: PlannedCheck, *_: object) -> CheckedCell:
        measured.append(planned.row["policy"])
        if "restorekv" in planned.row["policy"]:
            raise MissingWeights(
                "restorekv has no weights: make them with `larder train restorekv`"
            )
        return CheckedCell(planned.row, ())

    monkeypatch.setattr(check, "check_cell", checked)
    restored = "whole() > protect(sinks=4, recent=0) > reconstruct() > global() > restorekv()"
    result = run("bench", "--check", "--study", "larder_rivals", "--json")
    [found] = document(result)["checks"]
    assert result.exit_code == 0 and found["outcome"] == "equal"
    assert len(found["untrained"]) == len(measured) - 1
    assert all("larder train restorekv" in reason for reason in found["untrained"])
    measured.clear()
    result = run("bench", "--check", "--study", "larder_rivals", "--policy", restored)
    assert result.exit_code == 1 and len(measured) == 1
    assert "skipped: None of the policies" in result.stdout
    assert f"not measured: {restored}" in result.stdout
