"""`larder demo`: one conversation, five policies, one table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli_results import Run, complaint, document
from larder import Conversation, Engine
from larder.cli.demo import command
from larder.engine import engine

NAMES = ["full", "streaming_llm", "snapkv_blockwise", "kvzip_blockwise", "epicache"]
WHOLE = command._conversation


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's conversation, cut to what a test has time for."""

    def beginning() -> Conversation:
        whole = WHOLE()
        return replace(whole, messages=whole.messages[:12], questions=whole.questions[:2])

    monkeypatch.setattr(command, "_conversation", beginning)
    # Measuring takes longer than all the rest, and no figure here depends on it.
    monkeypatch.setattr(engine, "calibrate", lambda *_: {"sensitivity": (0.9,) * 6})


def test_the_bundled_conversation_has_questions() -> None:
    assert len(WHOLE().questions) >= 20 and len(WHOLE().messages) > 300


def test_table(run: Run) -> None:
    result = run("demo", "--budget", "100")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    for name in NAMES:
        assert [line for line in lines if line.startswith(f"{name} ")]
    for word in ("life-log", "KV peak*", "* the peak", "Go on: larder ask"):
        assert word in result.stdout


def test_document(run: Run) -> None:
    told = document(run("demo", "--json", "--budget", "100"))
    assert [row["name"] for row in told["rows"]] == NAMES
    full, *others = told["rows"]
    assert full["kv_bytes"] >= full["full_kv_bytes"]
    assert all(row["budget_tokens"] == 100 for row in others)
    assert all(row["active_kv_bytes"] < full["active_kv_bytes"] for row in others)
    assert all(len(row["answers"]) == 2 for row in told["rows"])


def test_a_model_that_is_not_there_is_told(run: Run) -> None:
    assert "does not exist" in complaint(run("demo", "--model", "./nowhere"), 1)


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Engine.read

    def stopping(self: Engine, *rest: object) -> object:
        if "snapkv(" in str(self.policy):
            raise KeyboardInterrupt
        return read(self, *rest)  # pyright: ignore

    monkeypatch.setattr(Engine, "read", stopping)
    result = run("demo", "--json", "--budget", "100")
    assert result.exit_code == 130
    assert [row["name"] for row in document(result)["rows"]] == NAMES[:2]


def test_a_bad_budget_is_known_at_once(run: Run) -> None:
    assert "is not a size" in complaint(run("demo", "--budget", "some"), 2)
