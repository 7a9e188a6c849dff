"""Disks that are full, broken, slow or shared: answers stay right, and others are served."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from larder import LarderError
from larder.core import Refused, StoreError, StoreSlow, Superseded
from larder.store import BLOBS_FOLDER as BLOBS
from larder.store import CallLimits, Tier, open_file_system
from store.caches import (
    IDS,
    LONGER,
    SPEC,
    WHO,
    asking,
    cache_files,
    is_exact,
    load,
    outcome,
    read,
    save,
    snapshot,
    store_at,
)
from store.file_systems import BROKEN, FULL, QUOTA, READ_ONLY, Faulty, refusing

pytestmark = pytest.mark.usefixtures("small_chunks")
OTHERS = (BROKEN, READ_ONLY, QUOTA)


@pytest.mark.failure(number=4)
@pytest.mark.parametrize(
    ("error", "step"),
    [(FULL, step) for step in range(8)] + [(e, s) for e in OTHERS for s in (0, 3, 6)],
)
def test_write_error_during_a_save_leaves_committed_sessions_exact(
    tmp_path: Path, error: int, step: int
) -> None:
    save(store_at(tmp_path))
    steps: list[str] = []

    def fail(what: str, path: str) -> None:
        if what in ("create", "replace"):
            steps.append(path)
            if len(steps) > step:
                raise OSError(error, os.strerror(error), path)

    file_system = Faulty(open_file_system(str(tmp_path / "store")), before=fail)
    store = store_at(tmp_path, file_system, call_limits=CallLimits(max_failures=100))
    text = tuple(range(50, 70))
    try:
        record = store.sessions.save(WHO, "new", text, snapshot(read(text)))
    except LarderError as said:
        assert isinstance(said, StoreError) and "untouched" in str(said)
        assert store.sessions.load(WHO, "new", asking()) is None
    else:
        assert record.spans == () or step > 6
        assert is_exact(load(store, "new"), text)
    assert is_exact(load(store)) and load(store).cache is not None
    assert outcome(tmp_path) == ("exact", "")


@pytest.mark.failure(number=4)
def test_unreadable_disk_raises(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    file_system = Faulty(open_file_system(str(tmp_path / "store")))
    store = store_at(tmp_path, file_system, call_limits=CallLimits(max_failures=100))
    file_system.before = refusing(BROKEN, "read")
    with pytest.raises(Refused, match="disk or server is well"):
        load(store)
    assert store.prefixes.match_prefix(WHO, LONGER, asking().identity, SPEC) is None
    with pytest.raises(StoreError, match="disk or server is well"):
        store_at(tmp_path, file_system)  # whether it is under a key cannot be told
    assert outcome(tmp_path) == ("exact", "")


@pytest.mark.failure(number=5)
def test_blob_deleted_before_its_load_falls_back_to_tokens(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    for path in cache_files(tmp_path):
        data = path.read_bytes()
        path.unlink()
        assert outcome(tmp_path) == ("tokens", "damaged")
        path.write_bytes(data)
    victim = cache_files(tmp_path)[0]

    def vanish(what: str, path: str) -> None:
        if what == "read" and path.startswith(BLOBS) and victim.exists():
            victim.unlink()

    file_system = Faulty(open_file_system(str(tmp_path / "store")), before=vanish)
    assert load(store_at(tmp_path, file_system)).reason == "damaged"


@pytest.mark.failure(number=5)
def test_missing_chunk_is_dropped_from_the_index_once(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.prefixes.save(WHO, IDS, read(IDS), asking().identity)
    for path in cache_files(tmp_path):
        path.unlink()
    for _ in range(2):
        assert store.prefixes.match_prefix(WHO, LONGER, asking().identity, SPEC) is None
    assert store.parts.refusals.counts() == {"damaged": 1}
    assert store.prefixes.save(WHO, IDS, read(IDS), asking().identity) == 20
    found = store.prefixes.match_prefix(WHO, LONGER, asking().identity, SPEC)
    assert found is not None and found.next_position == 20


@pytest.mark.failure(number=6)
@pytest.mark.extended
def test_hanging_disk_does_not_block_other_calls(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    go_on, hanging = threading.Event(), threading.Event()

    def hang(what: str, path: str) -> None:
        if what == "replace" and hanging.is_set():
            go_on.wait()

    file_system = Faulty(open_file_system(str(tmp_path / "store")), before=hang)
    store = store_at(
        tmp_path, file_system, call_limits=CallLimits(seconds=0.3, max_failures=2, rest_seconds=0.3)
    )
    hanging.set()
    with pytest.raises(StoreError, match="did not answer"):
        save(store, LONGER, name="new")
    assert is_exact(load(store)) and load(store).cache is not None  # others are served
    assert store.sessions.load(WHO, "new", asking()) is None
    hanging.clear()
    go_on.set()
    save(store, LONGER, name="new")
    assert is_exact(load(store, "new"), LONGER)


@pytest.mark.failure(number=6)
@pytest.mark.extended
def test_locked_manifest_opens_the_breaker(tmp_path: Path) -> None:
    patience = CallLimits(seconds=0.2, rest_seconds=0.5)
    store = store_at(tmp_path, call_limits=patience)
    save(store)
    other = sqlite3.connect(tmp_path / "home" / "manifest.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    for _ in range(20):  # the first one waits, the others are told at once
        with pytest.raises(StoreSlow, match="locked"):
            save(store, LONGER, name="new")
    assert time.monotonic() - started < 20 * patience.seconds
    other.execute("ROLLBACK")
    other.close()
    while True:
        try:
            save(store, LONGER, name="new")
            break
        except StoreSlow:
            time.sleep(0.05)
    assert is_exact(load(store)) and is_exact(load(store, "new"), LONGER)


@pytest.mark.failure(number=7)
@pytest.mark.extended
def test_concurrent_reads_and_writes_return_exact_sessions(tmp_path: Path) -> None:
    store, stop = store_at(tmp_path), threading.Event()
    texts = {name: (*IDS, number) for number, name in enumerate("abc")}
    wrong: list[object] = []
    save(store, texts["a"], name="a")

    def write(name: str) -> None:
        for _ in range(4):
            try:
                save(store, texts[name], name=name)
            except Superseded:  # the other writer of the same session was quicker
                continue

    def look() -> None:
        while not stop.is_set():
            for name, ids in texts.items():
                loaded = store.sessions.load(WHO, name, asking())
                if loaded is not None and not is_exact(loaded, ids):
                    wrong.append(loaded)

    reader = threading.Thread(target=look)
    writers = [threading.Thread(target=write, args=(name,)) for name in [*texts, "a"]]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert not wrong
    for name, ids in texts.items():
        assert is_exact(load(store, name), ids) and load(store, name).cache is not None
    assert store.parts.ledger.used(Tier.DISK) > 0
