"""Blobs whose deletion hangs or fails, and calls that meet them meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from larder.core import StoreError, StoreSlow
from larder.store import (
    DELETION_LEASE_SECONDS,
    BlobRef,
    CallLimits,
    SessionTurn,
    Store,
    blob_path,
    digest_of,
    encode_token_log,
    open_file_system,
)
from store.caches import IDS, LONGER, TALK, WHO, is_exact, load, save, store_at
from store.file_systems import BROKEN, Faulty, Hanging, refusing

pytestmark = pytest.mark.usefixtures("small_chunks")
SHORT = CallLimits(seconds=0.3, max_failures=100)


def hanging(folder: Path) -> Hanging:
    """A place where blobs are deleted once that is allowed."""
    disk = Hanging(folder, "remove", "blobs/")
    disk.armed.set()
    return disk


def log(store: Store) -> tuple[str, bytes, BlobRef]:
    """The tenant, and a log of tokens that no session has, as bytes and as a blob."""
    tenant = store.parts.tenant(WHO)
    data = encode_token_log(IDS, tenant, "nobody's")
    return tenant, data, BlobRef(digest_of(data), len(data))


def put(store: Store) -> BlobRef:
    tenant, data, _ = log(store)
    with store.parts.blobs.saving(tenant) as saving:
        ref = saving.put(data)
        store.parts.blobs.release_ownership([ref])
    return ref


def stays(store: Store) -> bool:
    tenant, _, ref = log(store)
    with store.parts.blobs.saving(tenant) as saving:
        found = saving.retain(ref)
        store.parts.blobs.release_ownership([ref])
    return found


def _removed(store: Store) -> None:
    store.sessions.remove(WHO, TALK)


def _evicted(store: Store) -> None:
    spans = load(store).record.spans
    store.parts.blobs.index.release(spans)
    for _, chunk, *_ in reversed(store.parts.chunks.all()):
        store.parts.chunks.drop(chunk, store.parts.tenant(WHO))
    store.parts.blobs.evict(spans)


def _swept(store: Store) -> None:
    store.parts.blobs.files.put(b"nobody refers to this")
    store.maintenance.sweep(grace_seconds=-1.0)


@pytest.mark.failure(number=6)
@pytest.mark.extended
@pytest.mark.parametrize("delete", [_removed, _evicted, _swept])
def test_hanging_deletion_does_not_block_others(
    tmp_path: Path, delete: Callable[[Store], None]
) -> None:
    disk, patience = hanging(tmp_path), CallLimits(seconds=20.0)
    here = store_at(tmp_path, disk.place, call_limits=patience)
    there = store_at(tmp_path, call_limits=patience)
    save(here, tuple(range(100, 121)))
    here.sessions.append(WHO, "other", SessionTurn(IDS, b"said"), 0)
    deleting = threading.Thread(target=delete, args=(here,))
    deleting.start()
    assert disk.hangs.wait(20)
    for epoch, store in enumerate((here, there), 1):
        found = store.sessions.read_transcript(WHO, "other")
        assert found is not None and found[0].epoch == epoch
        store.sessions.append(WHO, "other", SessionTurn((*IDS, epoch), b"more"), epoch)
        save(store, LONGER, name=f"new {epoch}")
        assert is_exact(load(store, f"new {epoch}"), LONGER)
        assert deleting.is_alive() and not disk.landed.is_set()
    disk.go.set()
    deleting.join()
    assert disk.landed.is_set() and is_exact(load(here, "new 1"), LONGER)


def deleting(folder: Path, now: list[float]) -> tuple[Hanging, Store, Store]:
    """A blob whose deletion was begun and hangs; who has begun it, and another process."""
    disk = hanging(folder)
    here = store_at(folder, disk.place, call_limits=SHORT, clock=lambda: now[0])
    tenant, data, _ = log(here)
    with here.parts.blobs.saving(tenant) as saving:
        saving.put(data)  # and it goes, as nothing names it
    assert disk.hangs.is_set() and not disk.landed.is_set()
    return disk, here, store_at(folder, call_limits=SHORT, clock=lambda: now[0])


@pytest.mark.failure(number=6)
@pytest.mark.extended
def test_blob_being_deleted_is_rewritten_after_the_deletion(tmp_path: Path) -> None:
    disk, here, there = deleting(tmp_path, [1e9])
    for each in (here, there):
        assert each.parts.blobs.files.has(log(each)[2]) and not stays(each)
        with pytest.raises(StoreSlow, match="was being deleted for 0.3 s"):
            put(each)
    disk.lands()
    ref = put(here)
    assert stays(here) and stays(there) and there.parts.blobs.files.get(ref)


@pytest.mark.failure(number=6)
def test_deletion_mark_holds_while_its_process_lives(
    tmp_path: Path,
) -> None:
    now = [1e9]
    disk, here, there = deleting(tmp_path, now)
    for _ in range(3):
        now[0] += 0.6 * DELETION_LEASE_SECONDS
        here.maintenance.forget_removed()  # as a server does all the time
        assert not stays(there)
    disk.lands()


@pytest.mark.failure(number=3)
def test_deletion_mark_of_a_killed_process_expires(
    tmp_path: Path,
) -> None:
    now = [1e9]
    here, there = (store_at(tmp_path, call_limits=SHORT, clock=lambda: now[0]) for _ in range(2))
    ref = put(here)
    assert here.parts.blobs.index.mark_deleting(ref.digest, now[0], now[0], now[0])
    assert not stays(there)
    now[0] += DELETION_LEASE_SECONDS
    assert stays(there) and put(there) == ref and there.parts.blobs.files.has(ref)
    now[0] += 2 * DELETION_LEASE_SECONDS
    assert there.parts.blobs.index.mark_deleting(ref.digest, now[0], now[0], now[0])
    now[0] += DELETION_LEASE_SECONDS
    os.utime(tmp_path / "store" / blob_path(ref.digest), (0, 0))
    assert here.maintenance.sweep(grace_seconds=-1.0) == ref.bytes
    with here.parts.manifest.reading() as rows:
        assert rows("SELECT * FROM leaving") == rows("SELECT * FROM blobs") == []


@pytest.mark.failure(number=4)
def test_blob_is_kept_when_its_deletion_fails(tmp_path: Path) -> None:
    place = Faulty(open_file_system(str(tmp_path / "store")), refusing(BROKEN, "remove"))
    here, there = (
        store_at(tmp_path, place, call_limits=SHORT),
        store_at(tmp_path, call_limits=SHORT),
    )
    ref = put(here)
    here.parts.blobs.index.touch(ref.digest, 0.0)
    with pytest.raises(StoreError, match="disk or server is well"):
        here.parts.blobs.drop([ref])
    assert stays(here) and stays(there) and there.parts.blobs.files.has(ref)
