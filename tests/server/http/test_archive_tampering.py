"""Detection of changes to an encrypted archive by someone without its key."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from larder.core import Damaged, StoreError
from larder.server import CONVERSATION, RESPONSE, Archive, LoopbackAuth
from larder.store import encryption_for
from server.http.archive_fixtures import (
    ANNE,
    BOB,
    KEY,
    ONE,
    OTHER,
    TWO,
    archive_contents,
    fill,
    item,
    opened,
)
from server.http.running_server import running

pytest.importorskip("cryptography")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with opened(tmp_path) as archive:
        fill(archive)
    return tmp_path


@pytest.fixture
def rows(folder: Path) -> Iterator[sqlite3.Connection]:
    """Connection to the archive file of someone with access to the disk."""
    with closing(sqlite3.connect(folder / "archive.sqlite", isolation_level=None)) as base:
        yield base


def test_sealed_archive_round_trips(folder: Path) -> None:
    with opened(folder) as archive, closing(Archive()) as other:
        fill(other)
        assert archive_contents(archive) == archive_contents(other)
        assert [each.id for each in archive.items(ANNE, ONE)][0] == f"msg_{ONE}_0"


def test_sealed_archive_has_no_plaintext_names_or_texts(folder: Path) -> None:
    with opened(folder):  # the log beside it, too
        data = b"".join(file.read_bytes() for file in folder.iterdir())
    for word in (ANNE, BOB, ONE, TWO, "resp_1", "idem-key", "msg_", "says", "secret of", "user"):
        assert word.encode() not in data, word


def test_tenants_have_distinct_ids_for_equal_names(rows: sqlite3.Connection) -> None:
    ids = rows.execute("SELECT id FROM documents WHERE kind != 'key'").fetchall()
    assert len({*ids}) == len(ids) - 4  # a conversation and its contents have the same
    assert len(rows.execute("SELECT DISTINCT tenant FROM documents").fetchall()) == 3


def pick(rows: sqlite3.Connection, kind: str, number: int = 0) -> tuple[Any, ...]:
    asked = "SELECT rowid, * FROM documents WHERE kind = ? ORDER BY tenant, parent, place, id"
    return rows.execute(asked, (kind,)).fetchall()[number]


def set_to(rows: sqlite3.Connection, row: tuple[Any, ...], **columns: object) -> None:
    for name, value in columns.items():
        rows.execute(f"UPDATE documents SET {name} = ? WHERE rowid = ?", (value, row[0]))


def swap_bodies(rows: sqlite3.Connection, kind: str) -> None:
    first, second = pick(rows, kind), pick(rows, kind, 1)
    set_to(rows, first, body=second[8])
    set_to(rows, second, body=first[8])


def swap_places(rows: sqlite3.Connection) -> None:
    first, second = pick(rows, "item"), pick(rows, "item", 1)
    set_to(rows, first, place=second[5])
    set_to(rows, second, place=first[5])


def in_the_open(rows: sqlite3.Connection) -> None:
    set_to(rows, pick(rows, "item"), body='{"role": "system", "text": "forged"}')


def added_in_the_open(rows: sqlite3.Connection) -> None:
    row = list(pick(rows, "item", 2)[1:])
    row[2], row[4], row[7] = "msg_forged", 7, '["msg_forged", {"role": "user", "text": "forged"}]'
    rows.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def repeated(rows: sqlite3.Connection) -> None:
    row = list(pick(rows, "item", 2)[1:])
    row[2], row[4] = "msg_again", 7
    rows.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def to_another_conversation(rows: sqlite3.Connection) -> None:
    set_to(rows, pick(rows, "item"), parent=pick(rows, "item", 3)[4], place=9)


def to_another_tenant(rows: sqlite3.Connection) -> None:
    set_to(rows, pick(rows, "item"), tenant=pick(rows, "item", 6)[1])


def of_another_tenant(rows: sqlite3.Connection) -> None:
    first, second = pick(rows, "response"), pick(rows, "response", 1)
    assert first[1] != second[1]
    set_to(rows, first, body=second[8], bytes=second[7], made=second[6])


def of_another_kind(rows: sqlite3.Connection) -> None:
    set_to(rows, pick(rows, "response"), body=pick(rows, "answered")[8])


def at_another_time(rows: sqlite3.Connection) -> None:
    set_to(rows, pick(rows, "response"), made=1.0)


def first_left_out(rows: sqlite3.Connection) -> None:
    rows.execute("DELETE FROM documents WHERE rowid = ?", pick(rows, "item")[:1])


def last_left_out(rows: sqlite3.Connection) -> None:
    rows.execute("DELETE FROM documents WHERE rowid = ?", pick(rows, "item", 2)[:1])


def all_left_out(rows: sqlite3.Connection) -> None:
    rows.execute(
        "DELETE FROM documents WHERE parent = ? AND kind = 'item'", pick(rows, "item")[4:5]
    )


def contents_left_out(rows: sqlite3.Connection) -> None:
    rows.execute("DELETE FROM documents WHERE kind = 'contents'")


def document_left_out(rows: sqlite3.Connection) -> None:
    rows.execute("DELETE FROM documents WHERE kind = 'conversation'")


FORGERIES: dict[str, Callable[[sqlite3.Connection], None]] = {
    f.__name__: f
    for f in (
        swap_places,
        in_the_open,
        added_in_the_open,
        repeated,
        to_another_conversation,
        to_another_tenant,
        of_another_tenant,
        of_another_kind,
        at_another_time,
        first_left_out,
        last_left_out,
        all_left_out,
        contents_left_out,
        document_left_out,
    )
} | {
    f"swapped {kind}": lambda rows, kind=kind: swap_bodies(rows, kind)
    for kind in ("item", "conversation", "response", "contents")
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES.keys())
def test_forged_rows_are_detected(
    folder: Path, rows: sqlite3.Connection, forgery: Callable[[sqlite3.Connection], None]
) -> None:
    forgery(rows)
    with opened(folder) as archive, pytest.raises(Damaged):
        archive_contents(archive)


@pytest.mark.parametrize("kind", ["conversation", "contents"])
def test_restored_older_rows_are_detected(
    folder: Path, rows: sqlite3.Connection, kind: str
) -> None:
    before = rows.execute("SELECT rowid, * FROM documents WHERE kind = ?", (kind,)).fetchall()
    with opened(folder) as archive:
        archive.put(ANNE, CONVERSATION, ONE, {"id": ONE, "session": "another"})
        archive.append(ANNE, ONE, [item("msg_new", "a fourth")])
        assert len(archive.items(ANNE, ONE)) == 4
        for row in before:
            asked = "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            rows.execute(asked, row[1:])
        with pytest.raises(Damaged, match="was altered"):
            archive_contents(archive)


def test_deleted_message_cannot_be_reinserted(folder: Path, rows: sqlite3.Connection) -> None:
    before = rows.execute("SELECT * FROM documents WHERE kind = 'item'").fetchall()
    with opened(folder) as archive:
        archive.remove_item(ANNE, ONE, f"msg_{ONE}_1")
        assert len(archive.items(ANNE, ONE)) == 2
        asked = "INSERT OR IGNORE INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        rows.executemany(asked, before)
        with pytest.raises(Damaged):
            archive.items(ANNE, ONE)
        with pytest.raises(Damaged):
            archive.append(ANNE, ONE, [item("msg_new", "more")])
        with pytest.raises(Damaged):  # nor is it sealed by what follows
            archive.remove_item(ANNE, ONE, f"msg_{ONE}_2")
        assert archive.remove(ANNE, CONVERSATION, ONE)
        assert archive.get(ANNE, CONVERSATION, ONE) is None and archive.items(ANNE, ONE) == ()
        assert len(archive.items(ANNE, TWO)) == len(archive.items(BOB, ONE)) == 3


@pytest.mark.extended
def test_forged_conversation_is_a_500_and_can_be_deleted(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive.sqlite", sealing=encryption_for(KEY, "archive"))
    with (
        running(LoopbackAuth(), archive=archive) as served,
        httpx2.Client(base_url=served.url) as http,
    ):
        items = {"items": [{"role": "user", "content": "one"}]}
        place = f"/v1/conversations/{http.post('/v1/conversations', json=items).json()['id']}"
        with closing(sqlite3.connect(tmp_path / "archive.sqlite", isolation_level=None)) as rows:
            first_left_out(rows)
            error = http.get(f"{place}/items").json()["error"]
            assert (error["code"], error["type"]) == ("store_damaged", "server_error")
            document_left_out(rows)
        assert http.get(place).status_code == 500
        assert http.delete(place).json()["deleted"] is True
        assert http.get(place).status_code == 404


def test_deletion_and_rollback_of_all_documents_are_not_detected(
    folder: Path, rows: sqlite3.Connection
) -> None:
    """A response that is deleted or put back, and a conversation with all that belongs to it."""
    before = rows.execute("SELECT * FROM documents WHERE kind != 'key'").fetchall()
    with opened(folder) as archive:
        own = archive_contents(archive)
        rows.execute("DELETE FROM documents WHERE kind != 'key'")
        assert archive.get(ANNE, RESPONSE, "resp_1") is None and archive.items(ANNE, ONE) == ()
        rows.executemany("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)", before)
        assert archive_contents(archive) == own


def test_archive_opens_with_its_own_key_only(folder: Path, rows: sqlite3.Connection) -> None:
    with pytest.raises(StoreError, match="with another key"), opened(folder, OTHER):
        pass
    with pytest.raises(StoreError, match="give --key-file"), opened(folder, None):
        pass
    rows.execute("DELETE FROM documents WHERE kind = 'key'")
    with pytest.raises(StoreError, match="larder cache seal"), opened(folder):
        pass
