"""Chats on the disk: what is kept, what is refused, and what is never overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from larder import Conversation, Message
from larder.core import InputError, PromptLayout
from larder.session import (
    ChatIdentity,
    ChatLog,
    ChatLogFile,
    ChatTurn,
    chat_log_path,
    seal_chat_logs,
)
from larder.store import encryption_for

STAMP = ChatIdentity("seed", "abc", "single() > whole()")
LOG = ChatLog(
    Conversation(
        "talk",
        (Message("user", "«Hi» 👋", "Ann", "8 May", "Hi"), Message("assistant", "Hello.")),
        form=PromptLayout.TRANSCRIPT,
        opening="Below:\n",
        question_prompt="Say: {question}",
    ),
    (ChatTurn("What?", "That.", (1, 2, 3)),),
)


def written(name: str = "mine") -> tuple[Path, dict[str, Any]]:
    book = ChatLogFile(name)
    book.save(LOG, STAMP)
    return book.path, json.loads(book.path.read_text(encoding="utf-8"))


def test_saved_log_is_loaded() -> None:
    written()
    kept = ChatLogFile("mine").load()
    assert kept is not None and kept.log == LOG and kept.identity == STAMP


def test_loading_a_new_name_creates_no_folder(larder_home: Path) -> None:
    assert ChatLogFile("mine").load() is None
    assert not larder_home.exists()


def test_log_file_is_plain_json() -> None:
    _, record = written()
    assert record["schema"] == 1
    assert record["turns"][0]["messages"] == [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "That."},
    ]
    assert record["model"] == {"name": "seed", "fingerprint": "abc"}


def test_save_replaces_the_file_without_temporary_leftovers() -> None:
    book = ChatLogFile("mine")
    book.save(LOG, STAMP)
    book.save(LOG.with_turn(ChatTurn("More?", "No.", (4,))), STAMP)
    kept = ChatLogFile("mine").load()
    assert kept is not None and len(kept.log.turns) == 2
    assert [file.name for file in book.path.parent.iterdir()] == ["mine.json"]


def test_log_file_is_encrypted_under_a_key() -> None:
    pytest.importorskip("cryptography")
    path, _ = written()
    before, sealing = path.read_bytes(), encryption_for(b"k" * 32, "chats")
    with pytest.raises(InputError, match="larder cache seal"):  # anybody may have written it
        ChatLogFile("mine", sealing).load()
    assert (
        path.read_bytes() == before
        and seal_chat_logs(sealing) == 1
        and seal_chat_logs(sealing) == 0
    )
    assert b"What?" not in path.read_bytes() and b"seed" not in path.read_bytes()
    again = ChatLogFile("mine", encryption_for(b"k" * 32, "chats")).load()
    assert again is not None and again.log == LOG
    for key, message in ((b"o" * 32, "with this key"), (None, "give --key-file")):
        with pytest.raises(InputError, match=message):
            ChatLogFile("mine", encryption_for(key, "chats")).load()


def test_crash_during_a_save_keeps_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = written()
    before = path.read_bytes()
    book = ChatLogFile("mine")
    book.load()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(KeyboardInterrupt):
            book.save(LOG.with_turn(ChatTurn("More?", "No.", (4,))), STAMP)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["mine.json"]


def _without(record: dict[str, Any], *keys: str | int) -> str:
    node: Any = record
    for key in keys[:-1]:
        node = node[key]
    del node[keys[-1]]
    return json.dumps(record)


def _with(record: dict[str, Any], value: object, *keys: str | int) -> str:
    node: Any = record
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return json.dumps(record)


DAMAGE = {
    "empty": lambda r: "",
    "cut": lambda r: json.dumps(r)[:-40],
    "list": lambda r: "[1]",
    "deep": lambda r: "[" * 100_000,
    "no schema": lambda r: _without(r, "schema"),
    "newer": lambda r: _with(r, 2, "schema"),
    "no model": lambda r: _without(r, "model"),
    "model text": lambda r: _with(r, "seed", "model"),
    "no history": lambda r: _without(r, "history"),
    "form": lambda r: _with(r, "poem", "history", "form"),
    "role": lambda r: _with(r, "robot", "history", "messages", 0, "role"),
    "content": lambda r: _with(r, 7, "history", "messages", 0, "content"),
    "turns": lambda r: _with(r, {}, "turns"),
    "one message": lambda r: _without(r, "turns", 0, "messages", 1),
    "no ids": lambda r: _with(r, [], "turns", 0, "ids"),
    "ids": lambda r: _with(r, [1, "2"], "turns", 0, "ids"),
    "negative": lambda r: _with(r, [-1], "turns", 0, "ids"),
    "truth": lambda r: _with(r, [True], "turns", 0, "ids"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_log_file_is_named_and_not_overwritten(damage: str) -> None:
    path, record = written()
    path.write_text(DAMAGE[damage](record), encoding="utf-8")
    before = path.read_bytes()
    book = ChatLogFile("mine")
    with pytest.raises(InputError, match="session name|Larder that wrote it") as caught:
        book.load()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InputError, match="changed by someone else"):
        book.save(LOG, STAMP)
    assert path.read_bytes() == before


def test_undecodable_file_is_reported_as_damaged() -> None:
    path, _ = written()
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(InputError, match="damaged"):
        ChatLogFile("mine").load()


def test_file_changed_by_another_chat_is_not_overwritten() -> None:
    path, _ = written()
    first, second = ChatLogFile("mine"), ChatLogFile("mine")
    first.load(), second.load()
    second.save(LOG.with_turn(ChatTurn("More?", "No.", (4,))), STAMP)
    before = path.read_bytes()
    with pytest.raises(InputError, match="changed by someone else"):
        first.save(LOG, STAMP)
    assert path.read_bytes() == before


def test_unwritable_home_is_named(larder_home: Path) -> None:
    larder_home.write_text("a file, not a folder")
    with pytest.raises(InputError, match="LARDER_HOME"):
        ChatLogFile("mine").save(LOG, STAMP)


@pytest.mark.parametrize("name", ["", ".", "..", "a\n", " a", "a" * 256, "a\0"])
def test_invalid_session_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="session's name must"):
        chat_log_path(name)


def test_every_name_has_its_own_file(larder_home: Path) -> None:
    names = ("a/b", "../a", "a\\b", "a b", "-a", ".a", "é", "a" * 101, "👩‍💻 notes", "~x")
    files = {chat_log_path(name) for name in names}
    assert len(files) == len(names) and {file.parent for file in files} == {
        larder_home / "sessions"
    }
    assert all(file.name.isascii() and len(file.name) < 100 for file in files)
    book = ChatLogFile("👩‍💻 notes")
    book.save(LOG, STAMP)
    kept = ChatLogFile("👩‍💻 notes").load()
    assert kept is not None and kept.log == LOG


@pytest.mark.parametrize("name", ["a", "Ann_2.v1-b", "7", "a" * 100])
def test_simple_names_are_file_names(name: str, larder_home: Path) -> None:
    assert chat_log_path(name) == larder_home / "sessions" / f"{name}.json"
