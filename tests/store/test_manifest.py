"""Manifest of session heads: compare-and-swap of epochs, and damaged records and indexes."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest

from larder import LarderError
from larder.core import Damaged, Refused, StoreFull, Superseded
from larder.store import (
    BlobIndex,
    Manifest,
    SessionKey,
    decode_record,
    encode_record,
    quarantine_database,
)
from larder.store import sqlite as store_sqlite
from store.file_systems import FULL, Faulty, refusing
from store.records import KEY, SECRET, TENANT, a_record, a_ref, heads_at

OWN = KEY


def test_record_round_trips_and_detects_flipped_bits() -> None:
    record = a_record(3, spans=(a_ref("a"), a_ref("b")), transcript=a_ref("c"), made=1.5)
    data = encode_record(record, SECRET)
    assert decode_record(data, SECRET) == record
    assert set(record.refs) == {a_ref("tokens 3"), a_ref("a"), a_ref("b"), a_ref("c")}
    for index in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[index] ^= 1 << index % 8
        with pytest.raises((Damaged, Refused)):
            decode_record(bytes(flipped), SECRET)
    with pytest.raises(Damaged, match="another secret"):
        decode_record(data, b"t" * 32)


@pytest.mark.failure(number=10)
def test_record_of_another_schema_is_refused() -> None:
    with pytest.raises(Refused, match="left as it is"):
        decode_record(encode_record(a_record(1, schema=2), SECRET), SECRET)


@pytest.mark.failure(number=30)
@pytest.mark.parametrize("name", ["../../etc/passwd", "@", "Ω", "a" * 255, "con", "a/b"])
def test_session_names_are_digests_in_paths(name: str) -> None:
    key = SessionKey.named(TENANT, name).session
    assert a_record(1).path.count("/") == 3 and name not in replace(a_record(1), session=key).path


def test_commits_are_flushed_to_the_disk(tmp_path: Path) -> None:
    spec = find_spec("larder.store.sqlite")
    assert spec is not None and spec.loader is not None
    outside_tests = module_from_spec(spec)  # inside, nothing is flushed
    spec.loader.exec_module(outside_tests)
    for module, flushes in ((outside_tests, 2), (store_sqlite, 0)):
        with closing(sqlite3.connect(tmp_path / f"{flushes}.sqlite")) as database:
            module.begin_log(database)
            assert database.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
            assert database.execute("PRAGMA synchronous").fetchall() == [(flushes,)]


def test_heads_move_by_compare_and_swap(tmp_path: Path) -> None:
    heads = heads_at(tmp_path)
    assert heads.head(OWN) is None
    heads.commit(a_record(1), expected=0)
    heads.commit(a_record(2), expected=1)
    with pytest.raises(Superseded, match="is at epoch 2, not 1 any more"):
        heads.commit(a_record(2), expected=1)
    with pytest.raises(Superseded):
        heads.commit(a_record(1), expected=0)
    assert heads.head(OWN) == a_record(2)
    assert BlobIndex(heads.manifest).live_digests() == {a_record(n).tokens.digest for n in (1, 2)}


@pytest.mark.failure(number=7)
def test_one_of_many_writers_of_an_epoch_wins(tmp_path: Path) -> None:
    ours, theirs = heads_at(tmp_path), heads_at(tmp_path, home="other machine")
    won: list[int] = []

    def write(number: int) -> None:
        try:
            record = a_record(1, num_tokens=number)
            (ours if number % 2 else theirs).commit(record, expected=0)
            won.append(number)
        except Superseded:
            return

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = won
    for heads in (ours, theirs):
        head = heads.head(OWN)
        assert head is not None and head.num_tokens == winner


@pytest.mark.failure(number=20)
def test_head_written_by_another_machine_is_found(tmp_path: Path) -> None:
    ours, theirs = heads_at(tmp_path), heads_at(tmp_path, home="other machine")
    for epoch in range(1, 8):
        theirs.commit(a_record(epoch), expected=epoch - 1)
        theirs.prune(OWN, keep=2)
    with pytest.raises(Superseded, match="at epoch 7, not 0"):
        ours.commit(a_record(1), expected=0)
    ours.commit(a_record(8), expected=7)
    assert theirs.head(OWN) == a_record(8)


def test_unindexed_record_is_found(tmp_path: Path) -> None:
    heads = heads_at(tmp_path)
    heads.commit(a_record(1), expected=0)
    heads._files.create(a_record(2).path, encode_record(a_record(2), SECRET))
    assert heads.head(OWN) == a_record(2)


def test_reader_between_record_and_index_does_not_block_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = heads_at(tmp_path)
    create = heads._files.create

    def created(path: str, data: bytes) -> None:
        create(path, data)
        assert heads.head(OWN) is not None  # it is taken over into the index

    monkeypatch.setattr(heads._files, "create", created)
    for epoch in (1, 2, 3):
        heads.commit(a_record(epoch), expected=epoch - 1)
    assert heads.head(OWN) == a_record(3) and heads.manifest.epochs(OWN) == [1, 2, 3]


def test_session_is_created_during_tombstone_deletion(tmp_path: Path) -> None:
    heads = heads_at(tmp_path)
    other = SessionKey.named(TENANT, "another").session
    gone = replace(a_record(7, removed=True), session=other, name="another")
    heads._files.create(gone.path, encode_record(gone, SECRET))
    before = heads.before(TENANT, heads.newest(OWN), None)
    heads.forget(gone)
    assert (before, heads.before(TENANT, heads.newest(OWN), None)) == (0, 7)
    with pytest.raises(Superseded):  # for all that is known it is of a session that was removed
        heads.commit(a_record(1), expected=0)
    heads.commit(a_record(1), expected=0, is_new=True)
    assert heads.head(OWN) == a_record(1)
    with pytest.raises(Superseded):
        heads.commit(a_record(1), expected=0, is_new=True)


def test_old_epochs_are_pruned(tmp_path: Path) -> None:
    heads = heads_at(tmp_path)
    for epoch in range(1, 7):
        heads.commit(a_record(epoch), expected=epoch - 1)
    assert heads.prune(OWN, keep=2) == [a_record(n) for n in (1, 2, 3, 4)]
    assert heads.written(OWN) == heads.manifest.epochs(OWN) == [5, 6]
    assert heads.head(OWN) == a_record(6)


@pytest.mark.failure(number=20)
def test_removed_session_rejects_late_writers(tmp_path: Path) -> None:
    heads = heads_at(tmp_path)
    heads.commit(a_record(1), expected=0)
    heads.commit(a_record(2, removed=True), expected=1)
    assert heads.head(OWN) is None and a_record(2, removed=True).refs == ()
    with pytest.raises(Superseded):
        heads.commit(a_record(2), expected=1)


def _flip_row(heads: object, epoch: int) -> None:
    manifest = heads.manifest  # pyright: ignore[reportAttributeAccessIssue]
    with manifest.writing() as rows:
        [(data,)] = rows("SELECT record FROM epochs WHERE epoch = ?", (epoch,))
        flipped = bytearray(data)
        flipped[40] ^= 4
        rows("UPDATE epochs SET record = ? WHERE epoch = ?", (bytes(flipped), epoch))


def _flip_file(folder: Path, epoch: int) -> None:
    path = folder / "store" / a_record(epoch).path
    data = bytearray(path.read_bytes())
    data[40] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.failure(number=1)
def test_flipped_bit_in_the_manifest_is_repaired_from_the_record(tmp_path: Path) -> None:
    heads = heads_at(tmp_path)
    heads.commit(a_record(1), expected=0)
    heads.commit(a_record(2), expected=1)
    _flip_row(heads, 2)
    messages: list[str] = []
    heads._damaged = messages.append
    assert heads.head(OWN) == a_record(2) and messages
    messages.clear()
    assert heads.head(OWN) == a_record(2) and not messages


@pytest.mark.failure(number=1)
def test_record_with_a_flipped_bit_is_read_from_the_manifest(tmp_path: Path) -> None:
    heads = heads_at(tmp_path)
    heads.commit(a_record(1), expected=0)
    _flip_file(tmp_path, 1)
    assert heads.head(OWN) == a_record(1)


@pytest.mark.failure(number=1)
def test_flipped_bits_in_record_and_manifest_give_the_previous_epoch(tmp_path: Path) -> None:
    heads = heads_at(tmp_path)
    heads.commit(a_record(1), expected=0)
    heads.commit(a_record(2), expected=1)
    _flip_row(heads, 2)
    _flip_file(tmp_path, 2)
    assert heads.head(OWN) == a_record(1)
    heads.commit(a_record(2), expected=1)
    for epoch in (1, 2):
        _flip_row(heads, epoch)
        _flip_file(tmp_path, epoch)
    with pytest.raises(Damaged, match="begin it again"):
        heads.head(OWN)


def test_record_at_another_path_is_ignored(tmp_path: Path) -> None:
    heads = heads_at(tmp_path)
    heads.commit(a_record(1), expected=0)
    heads._files.create(a_record(2).path, encode_record(a_record(1), SECRET))
    assert heads.head(OWN) == a_record(1)


@pytest.mark.failure(number=1)
@pytest.mark.parametrize("damage", ["noise", "torn", "emptied", "page"])
def test_damaged_manifest_is_quarantined(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "manifest.sqlite"
    manifest = Manifest(path, SECRET)
    for number in range(4):
        manifest.adopt(a_record(number + 1, policy="x" * 9000))
    manifest.close()
    data = bytearray(path.read_bytes())
    if damage == "noise":
        data[:100] = b"x" * 100
    elif damage == "torn":
        data = data[: len(data) // 2]
    elif damage == "emptied":
        data[4096:] = b"\0" * (len(data) - 4096)
    else:
        data[4096:4200] = b"\xff" * 104
    path.write_bytes(bytes(data))
    with pytest.raises(LarderError):
        Manifest(path, SECRET)
    assert quarantine_database(path).name == "manifest.sqlite.damaged-1"
    assert Manifest(path, SECRET).sessions() == []


@pytest.mark.failure(number=10)
@pytest.mark.parametrize("schema", [1, 2])
def test_index_of_an_earlier_schema_is_migrated(tmp_path: Path, schema: int) -> None:
    heads = heads_at(tmp_path)
    heads.commit(a_record(1), expected=0)
    index, path = BlobIndex(heads.manifest), heads.manifest.path
    for number, tenant in enumerate("aab"):
        index.add(a_ref("x" * (number + 1)), tenant, 0.0)
    result = index.bytes_by_tenant()
    heads.manifest.close()
    before = sqlite3.connect(path, isolation_level=None)
    before.executescript(f"DROP TABLE leaving; PRAGMA user_version = {schema};")
    if schema == 1:
        before.executescript("DROP TABLE totals; DROP TRIGGER blob_came; DROP TRIGGER blob_went;")
    before.close()
    again = heads_at(tmp_path)
    assert again.head(OWN) == a_record(1)
    index = BlobIndex(again.manifest)
    assert index.bytes_by_tenant() == result == {"a": 3, "b": 3}
    assert index.mark_deleting(a_ref("x").digest, 0.0, 0.0, 1.0)
    assert index.confirm_deletion(a_ref("x").digest, 1.0) == ("a", 1)
    assert index.bytes_by_tenant() == {"a": 2, "b": 3}


def test_manifest_of_a_later_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.sqlite"
    Manifest(path, SECRET).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(LarderError, match="schema 9"):
        Manifest(path, SECRET)


@pytest.mark.failure(number=4)
def test_full_manifest_raises_store_full(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "manifest.sqlite", SECRET)
    with manifest.reading() as rows:
        rows("PRAGMA max_page_count = 24")
    with pytest.raises(StoreFull, match="make room"):
        for number in range(60):
            manifest.adopt(a_record(number + 1, policy="x" * 1000))
    assert manifest.sessions() == [OWN]


@pytest.mark.failure(number=4)
def test_failed_commit_is_not_visible(tmp_path: Path) -> None:
    heads = heads_at(tmp_path)
    heads.commit(a_record(1), expected=0)
    heads._files = Faulty(heads._files, refusing(FULL, "create"))
    with pytest.raises(StoreFull):
        heads.commit(a_record(2), expected=1)
    assert heads.head(OWN) == a_record(1)
