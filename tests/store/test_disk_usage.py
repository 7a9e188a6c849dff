"""Ledger charges for a disk that other machines write and evict on."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.store import NO_TENANT, Store, Tier, blob_path
from store.caches import IDS, TALK, WHO, compressed, load, save, snapshot, store_at


def of_nobody(store: Store) -> int:
    return store.parts.ledger.used(Tier.DISK, NO_TENANT)


@pytest.mark.failure(number=23)
@pytest.mark.parametrize("is_counted", [True, False])
def test_evicted_blob_of_another_machine_is_uncharged_once_if_counted(
    tmp_path: Path, is_counted: bool
) -> None:
    here, there = store_at(tmp_path, home="here"), store_at(tmp_path, home="there")
    there.sessions.save(WHO, TALK, IDS, snapshot(compressed(IDS)))
    if is_counted:
        here.maintenance.sweep()
    [span] = load(here).record.spans
    here.parts.blobs.settle()
    before = of_nobody(here)
    here.parts.blobs.index.release([span])
    for _ in range(2):
        here.parts.blobs.evict([span])
        here.parts.blobs.settle()
        assert before - of_nobody(here) == (span.bytes if is_counted else 0)
    assert load(here).reason == "evicted" and not there.parts.blobs.files.has(span)


@pytest.mark.failure(number=23)
def test_rewritten_blob_of_another_machine_is_charged_once(
    tmp_path: Path,
) -> None:
    there = store_at(tmp_path, home="there")
    there.sessions.save(WHO, TALK, IDS, snapshot(compressed(IDS)))
    here = store_at(tmp_path, home="here")
    [span] = load(here).record.spans
    here.parts.blobs.settle()
    before = here.parts.ledger.used(Tier.DISK)
    data = here.parts.blobs.files.get(span)
    there.parts.blobs.files.delete(span.digest)
    with here.parts.blobs.saving(load(here).record.tenant) as saving:
        assert saving.put(data) == span
    here.parts.blobs.settle()
    assert here.parts.ledger.used(Tier.DISK) == before


@pytest.mark.failure(number=21)
def test_damaged_blob_is_deleted_with_its_session(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    ref = load(store).record.tokens
    file = tmp_path / "store" / blob_path(ref.digest)
    file.write_bytes(b"less")
    assert store.sessions.remove(WHO, TALK) > 0
    assert not file.exists()
