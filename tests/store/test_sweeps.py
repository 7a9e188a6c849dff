"""What goes at a sweep, and what stays: chunks of several machines, and what a crash has left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from larder.store.shelves import GRACE_SECONDS
from larder.store.store import Store
from store.caches import (
    IDS,
    TALK,
    WHO,
    asking,
    blob_files,
    files,
    is_exact,
    load,
    save,
    store_at,
)

pytestmark = pytest.mark.usefixtures("small_chunks")
LONGER = (*IDS, 5, 6, 7)


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
            store.upkeep.forget_removed()
            store.upkeep.sweep()


def nothing_is_left(folder: Path, *stores: Store) -> bool:
    told = [*files(folder, "store/chunks"), *files(folder, "store/kept"), *blob_files(folder)]
    return not told and not any(store.parts.chunks.all() for store in stores)


class Stopped(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("where", ["families.forget", "heads.prune", "heads._drop"])
def test_3_a_removal_that_was_stopped_is_finished_by_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    clock, (part, name) = Clock(), where.split(".")

    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    store = store_at(tmp_path, clock=clock)
    save(store)
    save(store, LONGER)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(getattr(store.parts, part), name, stop)
        store.sessions.remove(WHO, TALK)
    again = store_at(tmp_path, clock=clock)
    for _ in range(2):
        clock.passes(again)
        assert again.turns.of(WHO) == [] and again.sessions.load(WHO, TALK, asking()) is None
    assert nothing_is_left(tmp_path, again) and files(tmp_path, "store/sessions") == []


def test_21_a_name_that_was_taken_anew_outlives_the_sweep(tmp_path: Path) -> None:
    clock = Clock()
    store = store_at(tmp_path, clock=clock)
    save(store)
    store.sessions.remove(WHO, TALK)
    save(store)
    clock.passes(store)
    assert [record.name for record in store.turns.of(WHO)] == [TALK]
    assert is_exact(load(store)) and load(store).cache is not None
