"""Stores that an earlier version wrote: refused, carried over by one command, and nothing lost.

The earlier version is made up: its records are of schema 0 and have other names of fields.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from larder import LarderError
from larder.core import Refused
from larder.store import CONTAINER_FORM, RECORD_FORM, Store, StoredForm, canonical_json
from larder.store.sessions import export
from store.caches import IDS, WHO, asking, is_exact, load, save, store_at
from store.earlier_version import know_schema_0, renamed, take_back
from store.test_crashes import in_a_child, killed_at

pytestmark = pytest.mark.usefixtures("small_chunks")
TALKS = ("raw", "int4")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Larder that knows schema 0."""
    know_schema_0(monkeypatch)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    store = store_at(tmp_path)
    for name in TALKS:
        save(store, IDS[:9], name=name)
        save(store, codec=name, name=name)
    assert take_back(store) > 2 * len(TALKS)
    store.close()
    return tmp_path


def check(store: Store) -> None:
    """Everything is as it was saved, also by the index alone."""
    for name in TALKS:
        there = load(store, name)
        assert there.ids == IDS and there.cache is not None
    assert is_exact(load(store, "raw"))
    assert {each.name for each in store.sessions.heads(WHO)} == set(TALKS)
    assert not store.maintenance.refused_records()
    found = store.prefixes.match_prefix(WHO, (*IDS, 5), asking().identity, asking().spec)
    assert found is not None and found.next_position >= 20


@pytest.mark.failure(number=10)
@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("home", ["home", "elsewhere"])
def test_store_of_an_earlier_version_is_upgraded(earlier: Path, home: str) -> None:
    store = store_at(earlier, home=home)
    for path, why in store.maintenance.refused_records().items():
        assert path.startswith("sessions/")
        assert "is of schema 0, this larder reads 1: 'larder cache upgrade' carries it over" in why
    assert store.maintenance.sweep(-1.0) == 0
    result = store.maintenance.upgrade()
    assert result.records == 2 * len(TALKS) and result.chunks and not result.refused
    check(store)
    again = store.maintenance.upgrade()
    assert (again.records, again.chunks) == (0, 0)
    store.sessions.save(WHO, "raw", (*IDS, 5))
    store.maintenance.sweep(-1.0)
    assert load(store, "raw").ids == (*IDS, 5)
    store.close()


@pytest.mark.failure(number=10)
@pytest.mark.usefixtures("steps")
def test_index_adopts_records_upgraded_by_another_machine(earlier: Path) -> None:
    store = store_at(earlier)
    with store.parts.manifest.writing() as rows:  # as the earlier version has indexed them
        for path in (earlier / "store" / "sessions").rglob("*.json"):
            rows("UPDATE epochs SET record = ? WHERE epoch = ?", (path.read_bytes(), path.stem))
    with pytest.raises(Refused, match="larder cache upgrade"):
        store.sessions.load(WHO, "raw", asking())
    other = store_at(earlier, home="elsewhere")
    other.maintenance.upgrade()
    other.close()
    check(store)


@pytest.mark.failure(number=10)
def test_upgrade_without_migration_steps_changes_nothing(earlier: Path) -> None:
    before = {path: path.read_bytes() for path in (earlier / "store").rglob("*.json")}
    store = store_at(earlier, home="elsewhere")
    result = store.maintenance.upgrade()
    assert (result.records, result.chunks) == (0, 0) and len(result.refused) == 2 * len(TALKS)
    assert all("use the version of larder that wrote it" in why for why in result.refused.values())
    assert {path: path.read_bytes() for path in before} == before


def killed_upgrades(earlier: Path, first: int, stride: int) -> int:
    """Upgrades of copies, each killed at a step and then repeated; the number of kills."""
    for kills, step in enumerate(range(first, 2000, stride)):
        own = earlier.parent / f"{earlier.name}-{step}"
        shutil.copytree(earlier, own)

        def upgrade(own: Path = own) -> None:
            store_at(own, home="elsewhere").maintenance.upgrade()

        ended = in_a_child(killed_at(step, upgrade))
        store = store_at(own, home="elsewhere")
        left = store.maintenance.refused_records()
        for name in TALKS:  # as it was told, or to be carried over
            try:
                assert load(store, name).ids == IDS
            except LarderError as error:
                assert left and "larder cache upgrade" in str(error)
        store.maintenance.upgrade()
        check(store)
        store.close()
        shutil.rmtree(own)
        if not ended:
            return kills
    raise AssertionError("an upgrade has too many steps")


@pytest.mark.failure(number=3)
@pytest.mark.extended
@pytest.mark.usefixtures("steps")
def test_upgrade_killed_at_some_steps_loses_nothing(earlier: Path) -> None:
    assert killed_upgrades(earlier, 9, 61) >= 2


@pytest.mark.failure(number=3)
@pytest.mark.stress
@pytest.mark.usefixtures("steps")
def test_upgrade_killed_at_every_step_loses_nothing(earlier: Path) -> None:
    assert killed_upgrades(earlier, 1, 1) > 50


@pytest.mark.failure(number=10)
def test_caches_of_an_earlier_version_are_upgraded_on_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(tmp_path)
    save(store)
    data = store.sessions.export(store.sessions.heads(WHO)[0])
    later = StoredForm(CONTAINER_FORM.name, CONTAINER_FORM.key, 2)
    monkeypatch.setattr("larder.store.blobs.container.CONTAINER_FORM", later)
    monkeypatch.setattr("larder.store.blobs.container.CONTAINER_VERSION", 2)
    there = load(store)
    assert there.cache is None and there.reason == "format" and there.ids == IDS
    read: list[int] = []

    def step(content: tuple[dict[str, Any], dict[str, Any]]) -> Any:
        tensors, metadata = content
        read.append(len(tensors))
        return tensors, metadata

    monkeypatch.setitem(vars(later), "steps", {1: step})
    assert is_exact(load(store)) and load(store).cache is not None and read
    store.sessions.import_file(data, WHO, "taken in")
    assert is_exact(load(store, "taken in"))


@pytest.mark.failure(number=10)
@pytest.mark.usefixtures("steps")
def test_exported_session_of_an_earlier_version_is_imported(
    earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(earlier, home="elsewhere")
    store.maintenance.upgrade()
    [record] = [each for each in store.sessions.heads(WHO) if each.name == "raw"]
    with monkeypatch.context() as patch:
        patch.setattr(
            export, "canonical_json", lambda value: canonical_json(renamed(value, "sessions"))
        )
        data = store.sessions.export(record)
    store.sessions.import_file(data, WHO, "taken in")
    assert is_exact(load(store, "taken in"))
    vars(RECORD_FORM)["steps"] = {}
    with pytest.raises(Refused, match="is of schema 0"):
        store.sessions.import_file(data, WHO, "again")
