"""`larder cache`: sessions that are kept, seen from outside."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_results import Run, complaint, document
from golden import homes
from larder.cli.store_options import open_store
from larder.core import LOCAL_PRINCIPAL, InputError
from larder.core.home import home
from larder.server import RESPONSE, Archive
from larder.session import ChatLogFile, upgrade_chat_logs
from larder.session.transcript.chat_log_file import _read_json, _sealed_bytes
from larder.store import (
    RECORD_SCHEMA,
    Store,
    decode_record,
    encode_record,
    encryption_for,
    store_secret,
)
from larder.store.blobs import container
from store.caches import IDS, asking, blob_files, is_exact, read, snapshot
from store.earlier_version import know_schema_0, take_back, take_chats_back


@pytest.fixture
def kept(larder_home: Path) -> Path:
    """A session called talk, saved in two states."""
    store = Store(str(home() / "store"), home())
    for ids in (IDS[:9], IDS):
        store.sessions.save(LOCAL_PRINCIPAL, "talk", ids, snapshot(read(ids)))
    store.close()
    return larder_home


def loaded(name: str) -> Any:
    store = Store(str(home() / "store"), home())
    found = store.sessions.load(LOCAL_PRINCIPAL, name, asking())
    store.close()
    return found


def test_empty_store_is_reported(run: Run) -> None:
    assert run("cache", "list").stdout == "No sessions are stored.\n"
    assert document(run("cache", "list", "--json"))["sessions"] == []
    assert "no session 'x'" in complaint(run("cache", "show", "x"), 1)
    assert "0 sessions are intact" in run("cache", "verify").stdout


def test_list_and_show_print_stored_sessions(run: Run, kept: Path) -> None:
    shown = run("cache", "list").stdout
    assert "talk" in shown and "full" in shown and "21" in shown
    [result] = document(run("cache", "list", "--json"))["sessions"]
    assert (result["session"], result["tokens"], result["epoch"]) == ("talk", 21, 2)
    result = document(run("cache", "show", "talk", "--json"))
    assert (
        result["states"] == [1, 2] and result["lossless"] and result["identity"]["weights"] == "w"
    )
    assert "identity weights" in run("cache", "show", "talk").stdout
    assert document(run("cache", "list", "--owner", "x", "--json"))["sessions"] == []


def test_encrypted_store_opens_with_its_key_only(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_bytes(b"k" * 32)
    other.write_text("ab" * 32)
    store = Store(str(home() / "store"), home(), key=b"k" * 32)
    store.sessions.save(LOCAL_PRINCIPAL, "talk", IDS, snapshot(read(IDS)))
    store.close()
    assert "talk" in run("cache", "list", "--key-file", str(key)).stdout
    assert "1 sessions are intact" in run("cache", "verify", "--key-file", str(key)).stdout
    assert "give --key-file" in complaint(run("cache", "list"), 1)
    assert "under another key" in complaint(run("cache", "list", "--key-file", str(other)), 1)
    other.write_bytes(b"x")
    assert "openssl rand" in complaint(run("cache", "list", "--key-file", str(other)), 1)


def test_verify_finds_damage(run: Run, kept: Path) -> None:
    assert "1 sessions are intact" in run("cache", "verify").stdout
    assert document(run("cache", "verify", "talk", "--json"))["sessions"] == [
        {"session": "talk", "problems": []}
    ]
    for path in blob_files(kept):
        path.write_bytes(path.read_bytes()[:-1])
    message = complaint(run("cache", "verify"), 1)
    assert "1 of 1 sessions are damaged" in message and "log of tokens is lost" in message
    error = document(run("cache", "verify", "--json"))["error"]
    assert error["type"] == "Damaged" and "talk: " in error["message"]


def test_verify_reports_records_of_other_versions(
    run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, path = sorted((kept / "store" / "sessions").rglob("*.json"))
    secret = store_secret(home())
    later = replace(decode_record(path.read_bytes(), secret), schema=99)
    path.write_bytes(encode_record(later, secret))
    error = document(run("cache", "verify", "--json"))["error"]
    assert (
        f"talk: The record of a session is of schema 99, this larder reads {RECORD_SCHEMA}"
        in (error["message"])
    )
    for index in home().glob("manifest.sqlite*"):
        index.unlink()
    message = complaint(run("cache", "verify"), 1)
    assert "1 records are of other versions, so that nothing unused was deleted" in message
    assert "is of schema 99" in message and path.read_bytes() == encode_record(later, secret)
    path.write_bytes(encode_record(replace(later, schema=RECORD_SCHEMA), secret))
    monkeypatch.setattr(container, "CONTAINER_VERSION", 2)
    monkeypatch.setattr(container, "CONTAINER_FORM", replace(container.CONTAINER_FORM, version=2))
    message = complaint(run("cache", "verify", "talk"), 1)
    assert "is of version 1, this larder reads 2: it is left as it is" in message


@pytest.mark.failure(number=10)
@pytest.mark.extended
@pytest.mark.parametrize("name", ["chats", "chats_sealed"])
def test_upgrade_migrates_a_home_of_an_earlier_version(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("cryptography")
    is_sealed = name.endswith("sealed")
    more = ("--key-file", str(homes.KEY)) if is_sealed else ()
    with homes.opened(name) as folder:
        monkeypatch.setenv("LARDER_HOME", str(folder))
        before = document(run("cache", "list", "--json", *more))
        chats = {file: file.read_bytes() for file in (folder / "sessions").glob("*.json")}
        assert before["sessions"] and chats
        store = open_store(None, homes.KEY if is_sealed else None)
        records, count = len(before["sessions"]), take_back(store)
        store.close()
        taken_back = 0 if is_sealed else take_chats_back(folder)
        for index in folder.glob("manifest.sqlite*"):
            index.unlink()
        assert document(run("cache", "list", "--json", *more))["sessions"] == []
        message = complaint(run("cache", "upgrade", *more), 1)
        assert "records and chats are left as they are" in message and "wrote it" in message
        know_schema_0(monkeypatch)
        assert "'larder cache upgrade' carries it over" in complaint(
            run("cache", "verify", *more), 1
        )
        result = document(run("cache", "upgrade", "--json", *more))
        assert result["upgraded_records"] + result["upgraded_chunks"] == count
        assert result["upgraded_records"] >= records and result["upgraded_chats"] == taken_back
        after = document(run("cache", "list", "--json", *more))
        assert by_name(after) == by_name(before)
        for file, data in chats.items():
            assert file.read_bytes() == data or json.loads(file.read_bytes()) == json.loads(data)
        assert "are intact" in run("cache", "verify", *more).stdout
        result = document(run("cache", "upgrade", "--json", *more))
        assert [result[f"upgraded_{kind}"] for kind in ("records", "chunks", "chats")] == [0, 0, 0]


def test_upgrade_without_a_store_reports_it(run: Run, larder_home: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    message = complaint(run("cache", "upgrade", "--store", str(nowhere)), 1)
    assert f"There is no store at {nowhere}" in message and "--store" in message
    assert "There is no store at" in complaint(run("cache", "upgrade"), 1)
    error = document(run("cache", "upgrade", "--json"))["error"]
    assert error["type"] == "InputError" and not nowhere.exists()
    (larder_home / "sessions").mkdir(parents=True)
    (larder_home / "sessions" / "mine.json").write_text('{"schema": 1}')
    done = run("cache", "upgrade")
    assert done.exit_code == 0 and "upgraded_chats 0" in done.stdout
    assert "There is no store at" in done.stderr


def by_name(listed: Any) -> dict[str, Any]:
    return {each["session"]: each for each in listed["sessions"]}


@pytest.mark.failure(number=10)
def test_upgrade_migrates_a_chat_of_an_earlier_version(
    larder_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    sealing = encryption_for(b"k" * 32, "chats")
    (larder_home / "sessions").mkdir(parents=True)
    path = larder_home / "sessions" / "mine.json"
    log = {"schema": 0, "history": [], "turns": []}
    path.write_bytes(_sealed_bytes(sealing, json.dumps(log).encode(), path.name))
    before = path.read_bytes()
    count, refused = upgrade_chat_logs(sealing)
    assert count == 0 and "is of schema 0" in refused[str(path)] and path.read_bytes() == before
    know_schema_0(monkeypatch)
    with pytest.raises(InputError, match="larder cache upgrade"):
        ChatLogFile("mine", sealing).load()
    assert upgrade_chat_logs(sealing) == (1, {})
    assert _read_json(path, sealing) == log | {"schema": 1}


def test_session_is_exported_and_imported(run: Run, kept: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.larder"
    assert run("cache", "export", "talk", str(file)).exit_code == 0
    assert "exists" in complaint(run("cache", "export", "talk", str(file)), 1)
    assert run("cache", "import", str(file), "copy").exit_code == 0
    assert "already" in complaint(run("cache", "import", str(file), "copy"), 1)
    there = loaded("copy")
    assert is_exact(there) and there.cache is not None
    run("cache", "import", str(file), "theirs", "--owner", "somebody")
    assert loaded("theirs") is None
    assert document(run("cache", "remove", "talk", "--json"))["session"] == "talk"
    assert loaded("talk") is None and loaded("copy").cache is not None
    assert "no session" in complaint(run("cache", "remove", "talk"), 1)


def test_seal_encrypts_plain_files(run: Run, larder_home: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    (key := tmp_path / "key").write_bytes(b"k" * 32)
    with closing(Archive(larder_home / "server" / "archive.sqlite")) as archive:
        archive.put("anne", RESPONSE, "r", {"text": "a secret"})
    (chat := larder_home / "sessions" / "mine.json").parent.mkdir()
    chat.write_text('{"schema": 1, "history": "a secret"}')
    assert "--key-file" in complaint(run("cache", "seal"), 2)
    for documents, chats in ((1, 1), (0, 0)):
        result = document(run("cache", "seal", "--key-file", key, "--json"))
        assert (result["documents"], result["chats"]) == (documents, chats)
    files = [*(larder_home / "server").iterdir(), chat]
    assert not any(b"secret" in file.read_bytes() for file in files)


@pytest.mark.failure(number=30)
def test_import_of_an_invalid_file_is_refused(run: Run, kept: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.larder"
    run("cache", "export", "talk", str(file))
    data = file.read_bytes()
    bad = tmp_path / "bad"
    for content in (data[:-1], data[:100], b"", b"\x80\x04}.", data[: len(data) // 2] + b"!" * 9):
        bad.write_bytes(content)
        assert "not an exported session" in complaint(run("cache", "import", str(bad), "bad"), 1)
    bad.write_bytes(blob_files(kept)[0].read_bytes())
    assert complaint(run("cache", "import", str(bad), "bad"), 1)
    assert "cannot be read" in complaint(run("cache", "import", str(tmp_path / "no"), "bad"), 1)
    assert "name must not hold" in complaint(run("cache", "import", str(file), "a\x01b"), 1)
    names = [each["session"] for each in document(run("cache", "list", "--json"))["sessions"]]
    assert names == ["talk"]
