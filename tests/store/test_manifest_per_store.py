"""A home that knows several stores: each has an index of its own."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from larder.store import Store
from store.caches import IDS, SECRET, TALK, WHO, asking, is_exact, load, save

pytestmark = pytest.mark.usefixtures("small_chunks")
MORE = (*IDS, 5, 6, 7)


def stored(folder: Path, name: str, home: str = "home") -> Store:
    return Store(str(folder / name), folder / home, secret=SECRET)


def names(store: Store) -> set[str]:
    return {record.name for record in store.sessions.heads(WHO)}


def test_stores_of_one_home_have_separate_manifests(tmp_path: Path) -> None:
    first, second = stored(tmp_path, "first"), stored(tmp_path, "second")
    save(first)
    assert names(second) == set() and second.sessions.load(WHO, TALK, asking()) is None
    save(second, MORE)
    save(second, name="other")
    first.close()
    second.close()
    first, second = stored(tmp_path, "first"), stored(tmp_path, "second")
    assert (names(first), names(second)) == ({TALK}, {TALK, "other"})
    assert is_exact(load(first)) and is_exact(load(second), MORE)
    first.sessions.remove(WHO, TALK)
    assert is_exact(load(second), MORE) and names(first) == set()


def test_legacy_manifest_belongs_to_the_first_store_that_opens_it(tmp_path: Path) -> None:
    store = stored(tmp_path, "store")
    save(store)
    store.sessions.load(WHO, TALK, asking())
    store.close()
    with sqlite3.connect(tmp_path / "home" / "manifest.sqlite") as database:
        database.execute("PRAGMA application_id = 0")  # as earlier versions have left it
    database.close()
    again, other = stored(tmp_path, "store"), stored(tmp_path, "other")
    with again.parts.manifest.reading() as rows:
        assert rows("SELECT uses FROM sessions") == [(2,)]
    assert again.parts.manifest.path.name == "manifest.sqlite"
    assert names(other) == set()


def test_store_inside_its_home_keeps_its_manifest_when_moved(tmp_path: Path) -> None:
    store = stored(tmp_path, "home/store")
    save(store)
    store.close()
    (tmp_path / "home").rename(tmp_path / "moved")
    again = stored(tmp_path, "moved/store", "moved")
    assert is_exact(load(again))
    assert again.parts.manifest.path == tmp_path / "moved" / "manifest.sqlite"
