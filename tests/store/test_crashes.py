"""Processes killed during a save: the committed state is readable and nothing dangles."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from larder import LarderError
from larder.store import TEMPORARY_FOLDER, BlobIndex, digest_in_path
from store.caches import WHO, asking, blob_files, files, is_exact, load, save, store_at

pytestmark = [
    pytest.mark.usefixtures("small_chunks"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked"),
]
TEXTS = tuple(tuple(range(100 + turn, 112 + 3 * turn)) for turn in range(4))
STEPS = 400  # more than a saving has


def in_a_child(run: Callable[[], None], patience: float = 60.0) -> int:
    """The signal that ended a process which ran this; 0 where it came to its end."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            run()
        except LarderError:
            pass
        finally:
            os._exit(0)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the process did not end")


def killed_at(step: int, run: Callable[[], None]) -> Callable[[], None]:
    """Run that is killed at one of the steps by which it changes the disk or the index."""
    count = [0]

    def passing(*_: Any) -> None:
        count[0] += 1
        if count[0] == step:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)

    def wrapped(inner: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **named: Any) -> Any:
            passing()
            made = inner(*args, **named)
            passing()
            return made

        return changed

    class Traced(sqlite3.Connection):
        def execute(self, text: str, *rest: Any) -> Any:
            is_change = text.split(" ", 1)[0] in ("BEGIN", "COMMIT", "INSERT", "DELETE", "UPDATE")
            return (wrapped(super().execute) if is_change else super().execute)(text, *rest)

    def change() -> None:
        connect = sqlite3.connect
        sqlite3.connect = lambda *args, **options: connect(*args, factory=Traced, **options)  # pyright: ignore
        for name in ("fsync", "replace", "link", "unlink"):
            setattr(os, name, wrapped(getattr(os, name)))
        run()

    return change


def turn(folder: Path, number: int) -> Callable[[], None]:
    """A process that opens the store and saves the session's state of a turn."""
    return lambda: save(store_at(folder, kept_epochs=2), TEXTS[number])


def check(folder: Path, may_be: set[int]) -> int:
    """See that the session is whole and nothing dangles; the turn that it is at."""
    store = store_at(folder, kept_epochs=2)
    assert not store.parts.refusals.counts()
    found = store.sessions.load(WHO, "talk", asking())
    at = -1
    if found is not None:
        at = TEXTS.index(found.ids)
        assert is_exact(found, TEXTS[at]) and found.cache is not None
    assert at in may_be
    live = BlobIndex(store.parts.manifest).live_digests()
    there = {
        digest_in_path(path.relative_to(folder / "store").as_posix()) for path in blob_files(folder)
    }
    assert live <= there, "something refers to a blob that is not there"
    store.maintenance.sweep(grace_seconds=-1.0)
    there = {
        digest_in_path(path.relative_to(folder / "store").as_posix()) for path in blob_files(folder)
    }
    assert there == BlobIndex(store.parts.manifest).live_digests()
    assert not files(folder, f"store/{TEMPORARY_FOLDER}")
    store.close()
    return at


def killed_everywhere(folder: Path, steps: range) -> int:
    """Save two turns behind a first one, each killed at a step and then saved in peace; the kills.

    It ends with the first step that a saving does not have.
    """
    kills = 0
    for step in steps:
        own = folder / str(step)
        save(store_at(own, kept_epochs=2), TEXTS[0])
        ended = [in_a_child(killed_at(step, turn(own, 1)))]
        check(own, {0, 1} if ended[0] else {1})
        ended.append(in_a_child(killed_at(step, turn(own, 2))))
        check(own, {0, 1, 2} if ended[1] else {2})
        save(store_at(own), TEXTS[3])
        assert is_exact(load(store_at(own)), TEXTS[3])
        kills += len([signal_ for signal_ in ended if signal_])
        if not any(ended):
            return kills
    return kills


@pytest.mark.failure(number=3)
@pytest.mark.extended
def test_save_killed_at_some_steps_keeps_the_committed_state(tmp_path: Path) -> None:
    assert killed_everywhere(tmp_path, range(11, 120, 53)) >= 4


@pytest.mark.failure(number=3)
@pytest.mark.stress
def test_save_killed_at_every_step_keeps_the_committed_state(tmp_path: Path) -> None:
    assert killed_everywhere(tmp_path, range(1, STEPS)) >= 100


def killed_at_random(folder: Path, times: int) -> int:
    """Keep a process saving, killed at any time; the kills."""
    source, kills, at = random.Random(7), 0, -1

    def talk() -> None:
        for number in range(max(at, 0), len(TEXTS) * 50):
            save(store_at(folder, kept_epochs=2), TEXTS[number % len(TEXTS)])

    for _ in range(times):
        child = os.fork()
        if not child:
            try:
                talk()
            finally:
                os._exit(0)
        time.sleep(source.uniform(0.01, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        at = check(folder, {-1, 0, 1, 2, 3} if at < 0 else {0, 1, 2, 3})
    return kills


@pytest.mark.failure(number=3)
def test_save_killed_at_random_times_keeps_the_committed_state(tmp_path: Path) -> None:
    assert killed_at_random(tmp_path, 4) == 4


@pytest.mark.failure(number=3)
@pytest.mark.stress
def test_save_killed_two_hundred_times_keeps_the_committed_state(tmp_path: Path) -> None:
    assert killed_at_random(tmp_path, 200) == 200
