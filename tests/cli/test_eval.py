"""`larder eval`: scores of one file, intervals over several, comparisons in pairs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import cli_results
from cli_results import CAT, QUESTIONS, SMALL, WINDOW, Run, complaint, document, write
from larder import Answer, Engine
from larder.core import InputError
from larder.evaluation import answer_metrics, exact_match

FULL = ("--policy", "full", "--max-new-tokens", "8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files with three questions."""
    (tmp_path / "talks").mkdir()
    cli_results.talk(tmp_path / "talks" / "a.json")
    cli_results.talk(tmp_path / "talks" / "b.json", QUESTIONS[:1])
    return tmp_path / "talks"


def test_single_file_has_scores_by_question_and_kind(run: Run, talk: Path) -> None:
    result = document(run("eval", talk, *FULL, "--json"))
    assert "files" not in result
    assert [answer["answer"] for answer in result["answers"]] == ["Mira", "July 5"]
    assert all(answer["exact"] is True for answer in result["answers"])
    summary = result["summary"]
    assert (summary["exact"], summary["f1"], summary["f1_stemmed"]) == (1.0, 1.0, 1.0)
    assert summary["kinds"]["pets"] == {
        "questions": 1,
        "exact": 1.0,
        "contains": 1.0,
        "f1": 1.0,
        "f1_stemmed": 1.0,
    }
    assert summary["decode_tokens_per_second"] > 0


def test_several_files_have_intervals_around_the_mean(run: Run, folder: Path) -> None:
    result = document(run("eval", folder, *SMALL, "--json"))
    assert [Path(one["file"]).name for one in result["files"]] == ["a.json", "b.json"]
    assert all(one["schema"] == 1 and one["budget_tokens"] == 48 for one in result["files"])
    assert (result["summary"]["files"], result["summary"]["questions"]) == (2, 3)
    for metric in ("exact", "contains", "f1", "f1_stemmed"):
        interval = result["summary"][metric]
        assert interval["low"] <= interval["mean"] <= interval["high"]
    marks = [answer["exact"] for one in result["files"] for answer in one["answers"]]
    assert result["summary"]["exact"]["mean"] == pytest.approx(sum(marks) / 3)


@pytest.mark.extended
def test_interval_over_two_files_warns(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_at(monkeypatch, CAT, InputError("no cats."))
    shown = run("eval", folder, *SMALL)
    assert shown.stderr.startswith("larder: an interval over two files only spans")
    assert len(shown.stderr.splitlines()) == 1
    result = document(run("eval", folder, *FULL, "--json"))
    means = sorted(one["summary"]["f1"] for one in result["files"])
    interval = result["summary"]["f1"]
    assert [interval["low"], interval["high"]] == pytest.approx(means) == [0.0, 0.5]
    cli_results.talk(folder / "c.json")
    assert run("eval", folder, *SMALL).stderr == ""
    cli_results.talk(folder / "c.json", [{"question": "Who knows?", "answer": ""}])
    assert "two files" in run("eval", folder, *SMALL).stderr


@pytest.mark.extended
def test_paired_difference_is_that_of_the_means(run: Run, folder: Path) -> None:
    result = document(run("eval", folder, *SMALL, "--against", "full", "--json"))
    against = result["summary"]["against"]
    assert "unlimited()" in against["policy"] and len(against["files"]) == 2
    difference = result["summary"]["f1"]["mean"] - against["f1"]["mean"]
    assert against["difference"]["f1"]["mean"] == pytest.approx(difference)


def test_comparison_with_itself_has_no_differences(run: Run, talk: Path) -> None:
    result = document(run("eval", talk, *SMALL, "--against", "snapkv", "--json"))
    zero = {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert result["summary"]["against"]["difference"]["f1"] == zero


@pytest.mark.extended
def test_tables_have_answers_intervals_and_paired_differences(
    run: Run, talk: Path, folder: Path
) -> None:
    one = run("eval", talk, *FULL)
    assert (one.exit_code, one.stderr) == (0, "")
    for word in ("question", "Mira", "July 5", "pets", "F1 stemmed", "without a budget"):
        assert word in one.stdout
    several = run("eval", folder, *SMALL, "--against", "full").stdout
    for word in ("a.json", "b.json", "95% interval", "difference in pairs"):
        assert word in several


@pytest.mark.extended
def test_tables_report_dense_layers(run: Run, talk: Path, folder: Path) -> None:
    parts = "protect(sinks=2, recent=4) > sinks_and_window(sinks=2) > uniform() > park()"
    policy = ("--policy", f"{parts} > flat(page=4, dense=2) > lagged(tokens=4)", "--budget", "25%")
    one = run("eval", talk, *policy).stdout
    assert "the budget does not cover layers 0, 1, which are dense: " in one
    assert "in dense layers" in run("eval", folder, *policy).stdout
    assert "does not cover" not in run("eval", talk, *SMALL).stdout


def test_scores_are_those_of_the_metrics(
    run: Run, talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_metrics, "exact_match", lambda *texts: not exact_match(*texts))
    result = document(run("eval", talk, *FULL, "--json"))
    assert result["summary"]["exact"] == 0.0


def test_without_nltk_the_stemmed_score_is_left_out(
    run: Run, talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nltk", None)
    result = document(run("eval", talk, *FULL, "--json"))
    assert result["summary"]["f1"] == 1.0
    assert "f1_stemmed" not in result["summary"] and "f1_stemmed" not in result["answers"][0]
    assert run("eval", talk, *FULL).stdout.splitlines()[-6].split()[-1] == "-"


def fails_at(monkeypatch: pytest.MonkeyPatch, question: str, error: BaseException) -> None:
    """Asking this question raises this error from now on."""
    ask = Engine.ask

    def failing(self: Engine, memory: object, asked: str, *rest: object, **named: object) -> Answer:
        if asked == question:
            raise error
        return ask(self, memory, asked, *rest, **named)  # pyright: ignore

    monkeypatch.setattr(Engine, "ask", failing)


def test_question_that_fails_does_not_stop_the_rest(
    run: Run, talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_at(monkeypatch, CAT, InputError("too long."))
    result = run("eval", talk, *FULL, "--json")
    reply = document(result)
    assert result.exit_code == 0
    assert reply["answers"][0]["error"] == {"type": "InputError", "message": "too long."}
    assert "answer" not in reply["answers"][0] and reply["answers"][1]["answer"] == "July 5"
    assert (reply["summary"]["errors"], reply["summary"]["exact"]) == (1, 0.5)


@pytest.mark.extended
def test_interrupted_eval_scores_the_finished_questions(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli_results.talk(folder / "b.json", [*QUESTIONS, {"question": "Stop?", "answer": "Yes"}])
    fails_at(monkeypatch, "Stop?", KeyboardInterrupt())
    result = run("eval", folder, *SMALL, "--json")
    reply = document(result)
    assert result.exit_code == 130
    assert [len(one["answers"]) for one in reply["files"]] == [2, 2]
    assert reply["summary"]["questions"] == 4
    assert "only finished questions" in run("eval", folder, *SMALL).stdout


def test_file_that_does_not_fit_does_not_stop_the_others(run: Run, folder: Path) -> None:
    message = {"role": "user", "content": "Hello."}
    qa = [{"question": "Who?", "answer": "I"}]
    write(folder / "c.json", {"messages": [message], "qa": qa})
    result = document(run("eval", folder, "--policy", "snapkv", "--budget", "50%", "--json"))
    assert result["files"][2]["error"]["type"] == "BudgetError"
    assert "answers" in result["files"][0]


def test_budget_below_sinks_and_recent_is_refused(run: Run, talk: Path) -> None:
    line = complaint(run("eval", talk, "--policy", "snapkv", "--budget", "20"), 2)
    assert "smaller than sinks + recent" in line


def test_file_without_questions_is_refused(run: Run, tmp_path: Path) -> None:
    path = cli_results.talk(tmp_path / "mute.json", [])
    assert "has no questions" in complaint(run("eval", path), 1)
    assert WINDOW not in path.read_text()
