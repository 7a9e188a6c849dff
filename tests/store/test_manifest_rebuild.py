"""Rebuild of a lost, damaged or foreign manifest from the records beside the blobs."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from larder.store import Manifest, SessionTurn, Store
from store.caches import IDS, SECRET, WHO, asking, identity, save

pytestmark = pytest.mark.usefixtures("small_chunks")
NAMES = ("one", "two", "three", "four")


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    with closing(Store(str(folder / "store"), folder / "home", secret=SECRET)) as store:
        yield store


def listed(store: Store) -> tuple[int, int]:
    """Sessions of the server's list and of the command's that are there, with all that was said."""
    turns = [each.name for each in store.sessions.indexed_heads(WHO)]
    heads = [each.name for each in store.sessions.heads(WHO)]
    assert len(turns) == len({*turns}) and len(heads) == len({*heads})
    for name in {*turns, *heads}:
        loaded = store.sessions.load(WHO, name, asking())
        assert loaded is not None and loaded.ids == IDS and loaded.cache is not None
    return len(turns), len(heads)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Four sessions as a process leaves them that is killed: three of them in the log alone."""
    (folder := tmp_path / "machine").mkdir()
    with opened(folder) as store:
        for name in NAMES:
            save(store, name=name)
            if name == NAMES[0]:
                with store.parts.manifest.reading() as rows:
                    rows("PRAGMA wal_checkpoint(TRUNCATE)")
                    rows("PRAGMA wal_autocheckpoint = 0")
        shutil.copytree(folder, tmp_path / "as it was")
    shutil.rmtree(folder)
    return (tmp_path / "as it was").rename(folder)


def noise(path: Path) -> None:
    path.write_bytes(b"x" * 100 + path.read_bytes()[100:])


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = (noise, torn, emptied, Path.unlink)


@pytest.mark.failure(number=2)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("of", ["manifest", "log", "both"])
def test_sessions_are_listed_after_manifest_damage(
    killed: Path, damage: Callable[[Path], None], of: str
) -> None:
    if of != "log":
        damage(killed / "home" / "manifest.sqlite")
    if of != "manifest":
        damage(killed / "home" / "manifest.sqlite-wal")
    for _ in range(2):
        with opened(killed) as store:
            assert store.parts.manifest.path.name == "manifest.sqlite"
            assert listed(store) == (4, 4)


FOREIGN = {
    "another program": "CREATE TABLE bookmarks (url TEXT);",
    "a later program": "CREATE TABLE bookmarks (url TEXT); PRAGMA user_version = 75;",
    "of our number": "CREATE TABLE sessions (id TEXT); PRAGMA user_version = 3;",
}


@pytest.mark.parametrize("script", FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_database_is_quarantined(killed: Path, script: str) -> None:
    path = killed / "home" / "manifest.sqlite"
    for suffix in ("", "-wal", "-shm"):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(script)
    with opened(killed) as store:
        assert listed(store) == (4, 4)
    with closing(sqlite3.connect(path.with_name("manifest.sqlite.damaged-1"))) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    assert tables <= {"bookmarks", "sessions"} and tables


@pytest.mark.parametrize("table", ["sessions", "epochs", "spans", "chunks", "totals"])
def test_dropped_table_is_rebuilt(killed: Path, table: str) -> None:
    with closing(sqlite3.connect(killed / "home" / "manifest.sqlite")) as database:
        database.execute(f"DROP TABLE {table}")
    with opened(killed) as store:
        assert listed(store) == (4, 4)


@pytest.mark.parametrize("change", ["UPDATE epochs SET record = x'00'", "DELETE FROM epochs"])
def test_damaged_row_is_restored_from_its_record(killed: Path, change: str) -> None:
    with closing(sqlite3.connect(killed / "home" / "manifest.sqlite")) as database:
        database.execute(f"{change} WHERE session = (SELECT min(session) FROM epochs)")
        database.commit()
    with opened(killed) as store:
        assert listed(store) == (4, 4)


def test_manifest_of_another_home_is_rebuilt(killed: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    with closing(Store(str(killed / "store"), other, secret=b"o" * 32)) as store:
        store.sessions.append(WHO, "theirs", SessionTurn(IDS, b"{}"), 0)
    emptied(killed / "home" / "manifest.sqlite-wal")
    shutil.copy(other / "manifest.sqlite", killed / "home" / "manifest.sqlite")
    with opened(killed) as store:
        assert {each.name for each in store.sessions.indexed_heads(WHO)} == {*NAMES}


@pytest.mark.failure(number=3)
@pytest.mark.parametrize("step", range(8))
def test_interrupted_rebuild_loses_nothing(
    killed: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for suffix in ("", "-wal", "-shm"):
        emptied(killed / "home" / f"manifest.sqlite{suffix}")
    steps, adopt = iter(range(100)), Manifest.adopt
    rebuild, built = (
        "larder.store.prefix.chunk_index.ChunkIndex._insert",
        "larder.store.manifest.Manifest.mark_built",
    )

    def interrupted(*args: object) -> None:
        if next(steps) == step:
            raise KeyboardInterrupt
        adopt(*args)  # pyright: ignore

    def stopped(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Manifest, "adopt", interrupted)
        patch.setattr(rebuild if step % 2 else built, stopped)
        with opened(killed):
            pass
    with opened(killed) as store:
        assert listed(store) == (4, 4)
        tenant = store.parts.tenant(WHO)
        assert (
            store.parts.chunks.match_prefix(tenant, identity().key, IDS)
            and store.parts.manifest.is_built
        )


def test_sessions_of_another_machine_are_listed_after_a_start(killed: Path) -> None:
    with closing(Store(str(killed / "store"), killed / "theirs", secret=SECRET)) as theirs:
        theirs.sessions.save(WHO, "five", IDS)
        theirs.sessions.remove(WHO, "one")
        theirs.maintenance.forget_removed(-1.0)
    with opened(killed) as store:
        assert {each.name for each in store.sessions.indexed_heads(WHO)} == {
            "two",
            "three",
            "four",
            "five",
        }


def test_start_reads_no_indexed_records(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(killed) as store:
        assert listed(store) == (4, 4)
    read = list[str]()
    monkeypatch.setattr(
        "larder.store.sessions.epochs.SessionEpochs._beside", lambda *args: read.append(args[1])
    )
    with opened(killed):
        assert read == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_manifest_is_private_to_its_user(tmp_path: Path, umask: int) -> None:
    path, before = tmp_path / "home" / "manifest.sqlite", os.umask(umask)
    try:
        with closing(Manifest(path, SECRET)) as manifest:
            manifest.mark_built()
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        path.chmod(0o644)
        Manifest(path, SECRET).close()
    finally:
        os.umask(before)
    names = {"manifest.sqlite", "manifest.sqlite-wal", "manifest.sqlite-shm"}
    assert modes == dict.fromkeys(names, 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
