"""Blobs that several processes or machines refer to, and their deletion."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from larder.core import StoreSlow, Superseded
from larder.store import (
    BlobRef,
    CallLimits,
    SessionTurn,
    Store,
    add_owner,
    blob_path,
    digest_of,
    encode_token_log,
    open_file_system,
)
from store.caches import IDS, TALK, WHO, blob_files, compressed, load, save, snapshot, store_at
from store.file_systems import Faulty

pytestmark = pytest.mark.usefixtures("small_chunks")


def transcript_of(store: Store, name: str = TALK) -> bytes:
    found = store.sessions.read_transcript(WHO, name)
    assert found is not None
    return found[1]


@pytest.mark.failure(number=21)
@pytest.mark.parametrize("how", ["put", "stays"])
def test_blob_of_a_save_in_progress_is_not_deleted(tmp_path: Path, how: str) -> None:
    here, there = store_at(tmp_path), store_at(tmp_path)
    save(here)
    record = load(here).record
    tenant, ref = record.tenant, record.tokens
    with there.parts.blobs.saving(tenant) as saving:
        if how == "put":
            assert saving.put(encode_token_log(IDS, tenant, record.session)) == ref
        else:
            assert saving.retain(ref)
        here.sessions.remove(WHO, TALK)
        os.utime(tmp_path / "store" / blob_path(ref.digest), (0, 0))
        here.maintenance.sweep()
        assert there.parts.blobs.files.has(ref)
    assert not there.parts.blobs.files.has(ref)  # it has put it last, and nothing came of it


@pytest.mark.failure(number=21)
@pytest.mark.extended
def test_fork_continued_elsewhere_keeps_its_source_blobs(tmp_path: Path) -> None:
    here, there = (store_at(tmp_path, home=home, kept_epochs=2) for home in ("here", "there"))
    here.sessions.append(WHO, TALK, SessionTurn(IDS, b"said"), 0)
    here.sessions.fork(WHO, TALK, "fork")
    for number in range(2, 5):
        there.sessions.append(WHO, "fork", SessionTurn((*IDS, number), b"%d" % number), number - 1)
    there.maintenance.sweep(grace_seconds=-1.0)
    assert transcript_of(here) == transcript_of(store_at(tmp_path, home="new")) == b"said"
    assert load(here).ids == IDS


@pytest.mark.failure(number=21)
@pytest.mark.extended
def test_token_log_written_by_two_machines_is_kept(tmp_path: Path) -> None:
    here, there = (store_at(tmp_path, home=home, kept_epochs=1) for home in ("here", "there"))
    here.sessions.append(WHO, TALK, SessionTurn(IDS, b"said"), 0)
    there.sessions.append(WHO, "alike", SessionTurn(IDS, b"said"), 0)
    there.sessions.append(WHO, "alike", SessionTurn((*IDS, 1), b"more"), 1)
    assert transcript_of(here) == b"said" and load(here).ids == IDS
    there.sessions.remove(WHO, "alike")
    assert transcript_of(here) == b"said"
    here.sessions.remove(WHO, TALK)
    assert there.maintenance.sweep(grace_seconds=-1.0) == 0


@pytest.mark.failure(number=21)
@pytest.mark.parametrize("how", ["saved", "forked"])
def test_blob_referenced_by_another_machine_is_kept(tmp_path: Path, how: str) -> None:
    here, there = (store_at(tmp_path, home=home) for home in ("here", "there"))
    here.sessions.append(WHO, TALK, SessionTurn(IDS, b"said"), 0)
    if how == "saved":
        there.sessions.append(WHO, "other", SessionTurn(IDS, b"said"), 0)
    else:
        there.sessions.fork(WHO, TALK, "other")
    here.sessions.remove(WHO, TALK)
    assert (
        transcript_of(there, "other")
        == transcript_of(store_at(tmp_path, home="new"), "other")
        == b"said"
    )
    assert load(there, "other").ids == IDS
    there.sessions.remove(WHO, "other")
    assert blob_files(tmp_path) == []


@pytest.mark.failure(number=21)
def test_intermediate_epoch_of_another_machine_stays_complete(tmp_path: Path) -> None:
    here, there = (store_at(tmp_path, home=home, kept_epochs=3) for home in ("here", "there"))
    here.sessions.append(WHO, TALK, SessionTurn(IDS, b"said"), 0)
    with there.sessions.stage(WHO, IDS, snapshot(compressed(IDS))) as prepared:
        there.sessions.attach(WHO, TALK, prepared, 1)
    there.sessions.append(WHO, TALK, SessionTurn((*IDS, 1), b"more"), 2)
    here.sessions.append(WHO, TALK, SessionTurn((*IDS, 2), b"other"), 3)
    here.sessions.roll_back(WHO, TALK, 2)
    assert transcript_of(here) == b"said" and load(here).ids == IDS


@pytest.mark.failure(number=21)
def test_superseded_writer_deletes_no_shared_blobs(tmp_path: Path) -> None:
    turn, there = SessionTurn(IDS, b"said"), store_at(tmp_path, home="there")

    def first(what: str, path: str) -> None:
        if what == "create" and path.startswith("sessions/"):
            there.sessions.append(WHO, TALK, turn, 0)

    file_system = Faulty(open_file_system(str(tmp_path / "store")), before=first)
    here = store_at(tmp_path, file_system, home="here")
    with pytest.raises(Superseded):
        here.sessions.append(WHO, TALK, turn, 0)
    assert transcript_of(there) == b"said" and load(there).ids == IDS


def test_token_log_of_an_earlier_version_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for user in ("blobs.payloads", "sessions.session_store"):
            patch.setattr(
                f"larder.store.{user}.add_owner", lambda data, *whose: add_owner(data, whose[0])
            )
        store_at(tmp_path).sessions.append(WHO, TALK, SessionTurn(IDS, b"said"), 0)
    store = store_at(tmp_path)
    record = load(store).record
    assert record.tokens.digest != digest_of(encode_token_log(IDS, record.tenant, record.session))
    store.sessions.fork(WHO, TALK, "fork")
    store.sessions.remove(WHO, TALK)
    assert transcript_of(store, "fork") == b"said" and load(store, "fork").ids == IDS


@pytest.mark.failure(number=21)
@pytest.mark.parametrize("how", ["put", "stays"])
def test_blob_reported_present_during_its_deletion_remains(tmp_path: Path, how: str) -> None:
    there = store_at(tmp_path, call_limits=CallLimits(seconds=0.3, rest_seconds=0.0))
    tenant, was_taken = there.parts.tenant(WHO), list[bool]()
    data = encode_token_log(IDS, tenant, TALK)
    ref = BlobRef(digest_of(data), len(data))

    def take() -> bool:
        saving = stack.enter_context(there.parts.blobs.saving(tenant))
        return saving.put(data) == ref if how == "put" else saving.retain(ref)

    def meanwhile(what: str, path: str) -> None:
        if what == "remove" and path == blob_path(ref.digest):
            was_taken.append(False)
            with suppress(StoreSlow):
                was_taken.append(take())

    with ExitStack() as stack:
        here = store_at(
            tmp_path, Faulty(open_file_system(str(tmp_path / "store")), before=meanwhile)
        )
        with here.parts.blobs.saving(tenant) as saving:
            assert saving.put(data) == ref
        assert was_taken and any(was_taken) <= there.parts.blobs.files.has(ref)
        assert take() == there.parts.blobs.files.has(ref) == (how == "put")
