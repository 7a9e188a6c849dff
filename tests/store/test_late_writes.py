"""Records that are written late, lost, or removed by another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.core import Damaged, InputError, StoreError, StoreSlow, Superseded
from larder.store import CallLimits, SessionTurn, open_file_system, parallel_map
from store.caches import IDS, TALK, WHO, asking, load, read, save, snapshot, store_at
from store.file_systems import Faulty, Hanging

pytestmark = pytest.mark.usefixtures("small_chunks")
MORE = (*IDS, 5)
PATIENCE = CallLimits(seconds=0.5, max_failures=100)


@pytest.mark.failure(number=6)
@pytest.mark.extended
def test_blobs_of_a_late_record_are_kept(tmp_path: Path) -> None:
    disk = Hanging(tmp_path, "create", "sessions/")
    store = store_at(tmp_path, disk.place, call_limits=PATIENCE)
    one = store.sessions.append(WHO, TALK, SessionTurn(IDS, b"one"), 0)
    disk.armed.set()
    with pytest.raises(StoreSlow):
        store.sessions.append(WHO, TALK, SessionTurn(MORE, b"one two"), one.epoch)
    disk.lands()
    for each in (store, store_at(tmp_path, home="another machine"), store_at(tmp_path)):
        found = each.sessions.read_transcript(WHO, TALK)
        assert found is not None and found[0].epoch == 2 and found[1] == b"one two"
        assert each.parts.reader.ids(found[0]) == MORE
    # Who did not hear that it was written says the same again, and that is one turn.
    assert store.sessions.append(WHO, TALK, SessionTurn(MORE, b"one two"), one.epoch).epoch == 2


@pytest.mark.failure(number=6)
@pytest.mark.extended
def test_late_attached_cache_is_complete(tmp_path: Path) -> None:
    disk = Hanging(tmp_path, "create", "sessions/")
    store = store_at(tmp_path, disk.place, call_limits=PATIENCE)
    one = store.sessions.append(WHO, TALK, SessionTurn(IDS, b"one"), 0)
    disk.armed.set()
    result = snapshot(read(IDS))
    with pytest.raises(StoreSlow), store.sessions.stage(WHO, IDS, result) as prepared:
        store.sessions.attach(WHO, TALK, prepared, one.epoch)
    disk.lands()
    found = store_at(tmp_path).sessions.load(WHO, TALK, asking())
    assert found is not None and found.record.epoch == 2 and found.cache is not None


@pytest.mark.failure(number=6)
def test_blobs_of_a_failed_record_are_swept(tmp_path: Path) -> None:
    def fails(what: str, path: str) -> None:
        if what == "create" and path.startswith("sessions/"):
            raise OSError("The disk is not well.")

    inner = open_file_system(str(tmp_path / "store"))
    store = store_at(tmp_path, Faulty(inner, before=fails), call_limits=PATIENCE)
    with pytest.raises(StoreError):
        store.sessions.append(WHO, TALK, SessionTurn(IDS, b"one"), 0)
    assert list((tmp_path / "store" / "blobs").rglob("*.safetensors"))
    later = store_at(tmp_path, clock=lambda: 4e9)
    assert later.maintenance.sweep() > 0
    assert not list((tmp_path / "store" / "blobs").rglob("*.safetensors"))


@pytest.mark.failure(number=20)
def test_session_removed_by_another_machine_stays_removed(tmp_path: Path) -> None:
    here, there = store_at(tmp_path), store_at(tmp_path, home="another machine")
    save(here)
    epoch = load(there).record.epoch
    here.sessions.remove(WHO, TALK)
    here.maintenance.forget_removed(-1.0)
    assert there.sessions.has_moved(WHO, TALK, epoch)
    with pytest.raises(Superseded):
        there.sessions.append(WHO, TALK, SessionTurn(MORE, b"more"), epoch)
    assert there.sessions.load(WHO, TALK, asking()) is None
    assert there.sessions.indexed_heads(WHO) == [] and here.sessions.heads(WHO) == []


@pytest.mark.failure(number=20)
def test_sweep_drops_sessions_removed_by_other_machines(tmp_path: Path) -> None:
    here, there = store_at(tmp_path), store_at(tmp_path, home="another machine")
    save(here)
    save(here, name="stays")
    assert load(there).cache is not None and load(there, "stays").cache is not None
    here.sessions.remove(WHO, TALK)
    here.maintenance.forget_removed(-1.0)
    there.maintenance.sweep()
    assert [record.name for record in there.sessions.indexed_heads(WHO)] == ["stays"]


def test_unreadable_session_can_be_removed_and_recreated(
    tmp_path: Path,
) -> None:
    store = store_at(tmp_path)
    for ids in (IDS, MORE):
        save(store, ids)
    with store.parts.manifest.writing() as rows:
        rows("UPDATE epochs SET record = ?", (b"damaged",))
    for path in (tmp_path / "store" / "sessions").rglob("*.json"):
        path.write_bytes(b"damaged")
    for _ in range(2):
        with pytest.raises(Damaged, match="remove it, and begin it again"):
            store.sessions.read_transcript(WHO, TALK)
    with pytest.raises(Damaged):
        store.sessions.append(WHO, TALK, SessionTurn(IDS, b"one"), 0)
    store.sessions.remove(WHO, TALK)
    with pytest.raises(InputError):
        store.sessions.remove(WHO, TALK)
    assert store.sessions.read_transcript(WHO, TALK) is None
    again = store.sessions.append(WHO, TALK, SessionTurn(IDS, b"one"), 0)
    assert (
        again.epoch == 4
        and store_at(tmp_path, home="b").sessions.read_transcript(WHO, TALK) is not None
    )


@pytest.mark.failure(number=21)
def test_record_written_after_its_removal_is_deleted(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    one = store.sessions.append(WHO, TALK, SessionTurn(IDS, b"one"), 0)
    [path] = (tmp_path / "store" / "sessions").rglob("1.json")
    late = path.read_bytes()
    store.sessions.remove(WHO, TALK)
    path.write_bytes(late)
    assert store.sessions.read_transcript(WHO, TALK) is None
    store.maintenance.forget_removed(-1.0)
    assert not path.exists()
    assert (
        store.sessions.read_transcript(WHO, TALK) is None
        and store.sessions.indexed_heads(WHO) == []
    )
    assert store.sessions.append(WHO, TALK, SessionTurn(IDS, b"one"), 0).epoch > one.epoch


def test_sweep_ignores_foreign_files(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.sessions.append(WHO, "x~2", SessionTurn(IDS, b"one", {"root": "x"}), 0)
    stray = tmp_path / "store" / "families" / ".DS_Store"
    stray.write_bytes(b"")
    store.maintenance.sweep(0.0)
    assert stray.exists() and store.sessions.branches(WHO, "x") == ["x~2"]


@pytest.mark.parametrize("tidies", ["note_branches", "sweep"])
def test_unindexed_branches_are_indexed(tmp_path: Path, tidies: str) -> None:
    store = store_at(tmp_path)
    for name in ("x", "x~2", "x~3"):
        store.sessions.append(WHO, name, SessionTurn(IDS, b"one", {"root": "x"}), 0)
    for path in (tmp_path / "store" / "families").rglob("*.json"):
        path.unlink()
    assert store.sessions.branches(WHO, "x") == []
    getattr(store.maintenance, tidies)()
    assert set(store.sessions.branches(WHO, "x")) == {"x~2", "x~3"}


def test_concurrent_calls_all_run_when_one_fails() -> None:
    made = list[int]()

    def call(number: int) -> int:
        if number == 3:
            raise StoreSlow("The disk sleeps.")
        made.append(number)
        return 2 * number

    with pytest.raises(StoreSlow):
        parallel_map(call, range(20))
    assert sorted(made) == [number for number in range(20) if number != 3]
    assert (
        parallel_map(call, (number for number in (5, 4))) == [10, 8]
        and parallel_map(call, ()) == []
    )
