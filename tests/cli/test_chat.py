"""`larder chat`: one line is one turn, and a named session goes on."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cli_results import Run, complaint, document
from larder import Chat
from larder.store import LocalFileSystem

POLICY = 'episodes(embedder="tokens") > blockwise() > patched() > pooled()'
SMALL = ("--policy", POLICY, "--budget", "64", "--max-new-tokens", "8")


def test_lines_are_turns(run: Run) -> None:
    result = run("chat", *SMALL, stdin="My cat is called Mira.\n\nWhat is my cat called?\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == 2
    assert result.stdout.endswith("Mira\n")


def test_bytes_beyond_the_budget_are_reported_at_load(run: Run) -> None:
    result = run("chat", "--policy", "full", stdin="")
    [line] = result.stderr.splitlines()
    assert line == "larder: beyond the budget: unlimited() keeps everything that is read"
    assert run("chat", "--policy", "keydiff", "--budget", "64", stdin="").stderr == ""


def test_named_session_continues_in_the_next_run(run: Run, larder_home: Path) -> None:
    assert run("chat", "s", *SMALL, stdin="My cat is called Mira.\n").exit_code == 0
    assert (larder_home / "sessions" / "s.json").is_file()
    result = document(run("chat", "s", *SMALL, "--json", stdin="What is my cat called?\n"))
    assert (result["schema"], result["session"], result["turns"]) == (1, "s", 2)
    assert result["answers"][0]["answer"] == "Mira"


def test_changed_policy_is_reported_when_piped(run: Run) -> None:
    assert run("chat", "s", *SMALL, stdin="My cat is called Mira.\n").stderr == ""
    assert run("chat", "s", *SMALL, stdin="").stderr == ""
    other = run("chat", "s", "--policy", "keydiff", *SMALL[2:], stdin="")
    [line] = other.stderr.splitlines()
    assert line.startswith("larder: the session 's' used episodes(")
    assert "> pooled(tokens=64) >" in line
    assert "is prefilled again under single() > blockwise(tokens=64) >" in line
    assert other.exit_code == 0


def test_chat_starts_from_a_file(run: Run, talk: Path) -> None:
    result = run("chat", "--file", talk, *SMALL, stdin="What is my cat called?\n")
    assert result.stdout == "Mira\n"


def test_chat_commands_are_answered_and_unknown_ones_refused(run: Run) -> None:
    lines = "/help\nMy cat is called Mira.\n/figures\n/episodes\n/nope\n/quit\nnever said\n"
    result = run("chat", *SMALL, stdin=lines)
    for word in ("/figures", "1 turns", "budget 64 per kv head", "active"):
        assert word in result.stdout
    assert result.stderr == "larder: no command /nope: type /help.\n"
    assert "never" not in result.stdout


def test_refused_turn_does_not_end_the_chat(run: Run) -> None:
    lines = "word " * 90 + "\nMy cat is called Mira.\n"
    result = run("chat", *SMALL, "--json", stdin=lines)
    reply = document(result)
    assert result.exit_code == 0
    assert reply["answers"][0]["error"]["type"] == "InputError"
    assert reply["turns"] == 1 and "more than the budget" in result.stderr


def test_interrupted_chat_prints_the_finished_answers(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = Chat.say

    def stopping(self: Chat, text: str, *rest: object) -> object:
        if text == "stop":
            raise KeyboardInterrupt
        return say(self, text, *rest)  # pyright: ignore

    monkeypatch.setattr(Chat, "say", stopping)
    result = run("chat", *SMALL, "--json", stdin="Hello.\nstop\nnever\n")
    assert result.exit_code == 130
    assert len(document(result)["answers"]) == 1


def test_invalid_session_name_or_fractional_budget_is_refused(run: Run) -> None:
    assert "name must not" in complaint(run("chat", "a\u200bb", *SMALL, stdin="Hi\n"), 1)
    share = run("chat", "--budget", "20%", "--policy", "snapkv", stdin="Hi\n")
    assert "share of the context" in complaint(share, 2)


@pytest.mark.extended
def test_session_is_restored_instead_of_prefilled(
    run: Run, larder_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_nothing(*_: object) -> None:
        raise AssertionError("read again")

    assert run("chat", "s", *SMALL, stdin="My cat is called Mira.\n").exit_code == 0
    kept = document(run("cache", "list", "--json"))["sessions"]
    assert [(each["session"], each["codec"]) for each in kept] == [("s", "raw")]
    with monkeypatch.context() as patch:
        patch.setattr("larder.session.chat_cache.prefill_memory", read_nothing)
        result = document(run("chat", "s", *SMALL, "--json", stdin="What is my cat called?\n"))
    assert (
        result["answers"][0]["answer"] == "Mira" and result["restored_tokens"] == kept[0]["tokens"]
    )
    elsewhere = larder_home / "elsewhere"
    options = (*SMALL, "--store", elsewhere, "--codec", "int4", "--json")
    result = document(run("chat", "s", *options, stdin="What is my cat called?\n"))
    assert result["turns"] == 3 and result["restored_tokens"] == 0
    [kept] = document(run("cache", "list", "--store", elsewhere, "--json"))["sessions"]
    assert kept["codec"] == "int4"


def test_damaged_session_is_reported_and_recomputed(run: Run, larder_home: Path) -> None:
    run("chat", "s", *SMALL, stdin="My cat is called Mira.\n")
    for blob in (larder_home / "store" / "blobs").rglob("*.safetensors"):
        blob.write_bytes(blob.read_bytes()[:-1])
    result = run("chat", "s", *SMALL, stdin="What is my cat called?\n")
    assert result.stdout == "Mira\n" and result.exit_code == 0
    assert (
        result.stderr == "larder: the session 's' is prefilled again: the saved data is damaged\n"
    )


def test_unknown_codec_is_refused_at_startup(run: Run) -> None:
    result = run("chat", "s", *SMALL, "--codec", "int3", stdin="Hello.\n")
    assert "'int3'" in complaint(result, 2)


def test_unwritable_session_is_reported_before_the_first_turn(
    run: Run, larder_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = LocalFileSystem.create
    monkeypatch.setattr("larder.cli.question_run.load_model", None)  # fails where it is called

    def read_only(self: LocalFileSystem, path: str, data: bytes) -> None:
        if self.url == str(larder_home):
            raise OSError(errno.EROFS, "Read-only file system", path)
        create(self, path, data)

    monkeypatch.setattr(LocalFileSystem, "create", read_only)
    done = run("chat", "kept", stdin="")
    assert isinstance(done.exception, TypeError)  # the model would be loaded
    assert f"the turns of 'kept' are not saved: {larder_home} cannot be written" in done.stderr
    assert "set LARDER_HOME" in done.stderr
    assert "not saved" not in run("chat", stdin="").stderr  # it has no name


def test_unwritable_store_is_reported_before_the_first_turn(
    run: Run, larder_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = LocalFileSystem.create

    def read_only(self: LocalFileSystem, path: str, data: bytes) -> None:
        if self.url == str(larder_home / "store"):
            raise OSError(errno.EROFS, "Read-only file system", path)
        create(self, path, data)

    monkeypatch.setattr(LocalFileSystem, "create", read_only)
    done = run("chat", "kept", "--model", "seed", stdin="/quit\n")
    [line] = [line for line in done.stderr.splitlines() if "caches are not saved" in line]
    assert f"The store at {larder_home}/store cannot be written (Read-only file system)" in line
    assert "are not saved" not in run("chat", "other", "--store", larder_home / "else").stderr
