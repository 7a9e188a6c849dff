"""Sweeps of unreferenced chunks and blobs, on several machines and after crashes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from larder.core import Refused
from larder.store import GRACE_SECONDS, PrefixChunk, Store, Tier
from store.caches import (
    IDS,
    SPEC,
    TALK,
    WHO,
    asking,
    blob_files,
    files,
    is_exact,
    load,
    read,
    save,
    snapshot,
    store_at,
)

pytestmark = pytest.mark.usefixtures("small_chunks")
SIX_CHUNKS = (*IDS, 5, 6, 7)


class Clock:
    """Of files, too, at first."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now

    def passes(self, *stores: Store) -> None:
        """Time enough for what nobody needs to go at sweeps."""
        for store in stores:
            self.now += 2 * GRACE_SECONDS
            store.maintenance.forget_removed()
            store.maintenance.sweep()


def matched_tokens(store: Store) -> int:
    """Tokens of the beginning that a store finds."""
    found = store.prefixes.match_prefix(WHO, SIX_CHUNKS, asking().identity, SPEC)
    return 0 if found is None else found.next_position


def keep(store: Store) -> None:
    assert store.prefixes.save(WHO, IDS, read(IDS), asking().identity) == 20


def _has_read(there: Store) -> None:
    assert matched_tokens(there) == 20


def _has_loaded(there: Store) -> None:
    assert load(there).cache is not None


def _has_saved(there: Store) -> None:
    save(there, SIX_CHUNKS, name="other")
    there.sessions.remove(WHO, "other")


def _has_rebuilt(there: Store) -> None:
    """Its index was built from what is told beside the blobs."""


def nothing_is_left(folder: Path, *stores: Store) -> bool:
    result = [*files(folder, "store/chunks"), *files(folder, "store/kept"), *blob_files(folder)]
    return not result and not any(store.parts.chunks.all() for store in stores)


@pytest.mark.failure(number=21)
@pytest.mark.extended
@pytest.mark.parametrize("uses", [_has_read, _has_loaded, _has_saved, _has_rebuilt])
@pytest.mark.parametrize("is_here_first", [True, False])
def test_unreferenced_chunks_are_deleted_on_every_machine(
    tmp_path: Path, uses: Callable[[Store], None], is_here_first: bool
) -> None:
    clock = Clock()
    here, there = (store_at(tmp_path, home=home, clock=clock) for home in ("here", "there"))
    save(here)
    if uses is _has_rebuilt:
        there = store_at(tmp_path, home="new", clock=clock)
    uses(there)
    assert there.parts.chunks.all() or uses is _has_loaded
    clock.passes(here, there)
    assert is_exact(load(here)) and load(here).cache is not None
    here.sessions.remove(WHO, TALK)
    order = (here, there) if is_here_first else (there, here)
    clock.passes(*order, *order)
    assert nothing_is_left(tmp_path, here, there)


@pytest.mark.failure(number=21)
@pytest.mark.extended
def test_recently_matched_chunks_are_kept_by_sweeps(tmp_path: Path) -> None:
    clock = Clock()
    here = store_at(tmp_path, home="here", clock=clock)
    there = store_at(tmp_path, home="there", clock=clock)
    save(here)
    assert matched_tokens(there) == 20
    here.sessions.remove(WHO, TALK)
    for _ in range(3):
        clock.now += GRACE_SECONDS / 2
        assert matched_tokens(there) == 20
        there.maintenance.sweep()
    clock.passes(there, here)
    assert nothing_is_left(tmp_path, here, there)


@pytest.mark.failure(number=21)
@pytest.mark.extended
def test_saved_prefixes_without_sessions_are_kept(tmp_path: Path) -> None:
    clock = Clock()
    homes = ("here", "there", "who knows nothing of them")
    stores = [store_at(tmp_path, home=home, clock=clock) for home in homes]
    here, there, _ = stores
    save(here, SIX_CHUNKS)  # what is kept may have been a session's before
    keep(here)
    assert matched_tokens(there) == 20
    here.sessions.remove(WHO, TALK)
    clock.passes(*stores, *stores)
    new = store_at(tmp_path, home="new", clock=clock)
    clock.passes(new, *stores)
    assert [matched_tokens(each) for each in (*stores, new)] == [20] * 4
    tenant = here.parts.tenant(WHO)
    here.parts.blobs.make_room(tenant, here.parts.ledger.limit(Tier.DISK))
    clock.passes(*stores, new)
    assert nothing_is_left(tmp_path, *stores, new)


class Stopped(BaseException):
    """The process ends here."""


@pytest.mark.failure(number=3)
@pytest.mark.parametrize(
    "where",
    [
        "branches.forget",
        "epochs.prune",
        "epochs._drop",
        "garbage.states",
        "chunks.remove_unreferenced",
    ],
)
def test_sweep_finishes_an_interrupted_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    clock, (part, name) = Clock(), where.split(".")

    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    store = store_at(tmp_path, clock=clock)
    save(store)
    save(store, SIX_CHUNKS)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(getattr(store.parts, part), name, stop)
        store.sessions.remove(WHO, TALK)
    again = store_at(tmp_path, clock=clock)
    for _ in range(2):
        clock.passes(again)
        assert (
            again.sessions.indexed_heads(WHO) == []
            and again.sessions.load(WHO, TALK, asking()) is None
        )
    assert nothing_is_left(tmp_path, again) and files(tmp_path, "store/sessions") == []


@pytest.mark.failure(number=21)
def test_session_recreated_under_its_name_survives_the_sweep(tmp_path: Path) -> None:
    clock = Clock()
    store = store_at(tmp_path, clock=clock)
    save(store)
    store.sessions.remove(WHO, TALK)
    save(store)
    clock.passes(store)
    assert [record.name for record in store.sessions.indexed_heads(WHO)] == [TALK]
    assert is_exact(load(store)) and load(store).cache is not None


@pytest.mark.failure(number=21)
def test_cache_staged_for_a_removed_session_is_deleted(
    tmp_path: Path,
) -> None:
    store = store_at(tmp_path)
    store.sessions.save(WHO, TALK, IDS)
    with pytest.raises(Refused), store.sessions.stage(WHO, IDS, snapshot(read(IDS))) as staged:
        assert store.parts.chunks.all()
        store.sessions.remove(WHO, TALK)
        store.sessions.attach(WHO, TALK, staged, expected=1)
    assert nothing_is_left(tmp_path, store)


@pytest.mark.failure(number=21)
@pytest.mark.extended
def test_chunk_of_a_concurrent_save_is_kept(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with store.sessions.stage(WHO, IDS, snapshot(read(IDS))):
        save(store, SIX_CHUNKS, name="other")
        store.sessions.remove(WHO, "other")
        assert store.parts.chunks.all()
    assert nothing_is_left(tmp_path, store)
    with store.sessions.stage(WHO, IDS, snapshot(read(IDS))):
        save(store, SIX_CHUNKS, name="other")
    assert is_exact(load(store, "other"), SIX_CHUNKS) and load(store, "other").cache is not None


@pytest.mark.failure(number=21)
def test_chunks_written_by_two_threads_have_one_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saves write the record of a chunk before either has it in the index."""
    store, both = store_at(tmp_path), threading.Barrier(2)
    chunks = store.parts.chunks
    insert = chunks._insert

    def inserted_together(chunk: PrefixChunk, *rest: str) -> PrefixChunk | None:
        if not chunk.start:
            both.wait(10)
        return insert(chunk, *rest)

    monkeypatch.setattr(chunks, "_insert", inserted_together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: save(store, name=name), ("one", "other")))
    assert not [each for each in files(tmp_path, "store/chunks") if each.suffix == ".shared"]
    store.sessions.remove(WHO, "one")
    assert load(store, "other").cache is not None
    store.sessions.remove(WHO, "other")
    assert nothing_is_left(tmp_path, store)


@pytest.mark.extended
@pytest.mark.parametrize("days", [-1, 1])
def test_clock_change_neither_loses_nor_leaks_blobs(tmp_path: Path, days: int) -> None:
    clock = Clock()
    store = store_at(tmp_path, clock=clock)
    save(store)
    save(store, name="gone")
    store.sessions.remove(WHO, "gone")
    clock.now += 86400 * days
    save(store, SIX_CHUNKS)
    save(store, name="gone")
    again = store_at(tmp_path, clock=clock)
    for each in (store, again):
        each.maintenance.forget_removed()
        each.maintenance.sweep()
        assert is_exact(load(each), SIX_CHUNKS) and load(each).cache is not None
        assert is_exact(load(each, "gone")) and load(each, "gone").cache is not None
    for name in (TALK, "gone"):
        again.sessions.remove(WHO, name)
    clock.now += 86400  # until what was written before the clock was set back is old
    clock.passes(store, again, store)
    assert nothing_is_left(tmp_path, store, again) and files(tmp_path, "store/sessions") == []
