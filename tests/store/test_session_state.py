"""Session state beside caches: stored, exported, evicted and verified with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from larder.cache import SequenceCache, tables_path
from larder.core import Damaged
from larder.store import Record, SessionTurn, Store, Tier, restore_cache
from low_rank_weights import give_maps
from store.caches import IDS, SPEC, TALK, WHO, blob_files, compressed, load, snapshot, store_at

pytestmark = pytest.mark.usefixtures("small_chunks")
BESIDE = b"the way to the right one"


def kept(store: Store) -> Record:
    """A session whose caches have something beside them."""
    store.sessions.append(WHO, TALK, SessionTurn(IDS, b"said"), 0)
    result = replace(snapshot(compressed(IDS)), beside=BESIDE)
    with store.sessions.stage(WHO, IDS, result) as prepared:
        return store.sessions.attach(WHO, TALK, prepared, 1)


def test_session_state_is_stored_with_the_caches(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    kept(store)
    appended = store.sessions.append(WHO, TALK, SessionTurn((*IDS, 40), b"more"), 2)
    reader = store_at(tmp_path).parts.reader
    assert reader.extra_state(appended) == BESIDE
    other = store.sessions.append(WHO, TALK, SessionTurn((9, *IDS), b"another"), 3)
    assert other.spans == () and reader.extra_state(other) is None


def test_session_state_is_exported_with_the_caches(tmp_path: Path) -> None:
    store, other = store_at(tmp_path / "a"), store_at(tmp_path / "b")
    taken = other.sessions.import_file(store.sessions.export(kept(store)), "x", "moved")
    assert other.parts.reader.extra_state(taken) == BESIDE


def test_session_state_is_evicted_with_the_caches(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    record = kept(store)
    blobs = store.parts.blobs
    assert record.beside is not None and blobs.index.is_referenced(record.beside.digest)
    blobs.make_room(record.tenant, store.parts.ledger.limit(Tier.DISK))
    assert load(store).reason == "evicted"
    assert not blobs.index.is_referenced(record.beside.digest)


def test_damaged_session_state_is_detected(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    record = kept(store)
    [path] = [path for path in blob_files(tmp_path) if BESIDE in path.read_bytes()]
    path.write_bytes(path.read_bytes().replace(b"right", b"wrong"))
    with pytest.raises(Damaged):
        store.parts.reader.extra_state(record)
    [checked] = store.maintenance.verify(store.sessions.heads())
    assert [each.startswith("The state beside") for each in checked.problems] == [True]


def test_unknown_cache_form_raises_damaged() -> None:
    cache = SequenceCache(SPEC, "dense")
    with pytest.raises(Damaged, match="No cache form named 'folded'"):
        restore_cache(SPEC, cache.state(), cache.meta() | {"form": "folded"})


def test_cache_whose_trained_weights_are_missing_is_damaged() -> None:
    give_maps(SPEC)
    cache = SequenceCache(SPEC, "low_rank")
    state, meta = cache.state(), cache.meta()
    tables_path(SPEC.fingerprint, "less").unlink()
    with pytest.raises(Damaged, match="larder train less"):
        restore_cache(SPEC, state, meta)
