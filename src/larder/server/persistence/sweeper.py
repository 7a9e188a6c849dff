"""Keeping a server's store and memory tidy while it serves, on a thread of its own."""

from __future__ import annotations

import ctypes
import functools
import platform
import threading
import time
from collections.abc import Callable
from types import TracebackType

from larder.core.errors import LarderError
from larder.store.blobs.budgeted_blobs import GRACE_SECONDS
from larder.store.maintenance import TOMBSTONE_SECONDS
from larder.store.store import Store


class StoreSweeper:
    """Forgets what was removed, often; looks for what crashes left, seldom. Used by `with`.

    What the process has freed goes back to the system as often.

    Args:
        seconds: between two looks at what was removed.
        sweep_seconds: between two at everything.
    """

    def __init__(
        self,
        store: Store,
        seconds: float = TOMBSTONE_SECONDS / 2,
        sweep_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._store, self._seconds, self._sweep_seconds = store, seconds, sweep_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="larder sweeping", daemon=True)

    def __enter__(self) -> StoreSweeper:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        swept = time.monotonic()
        self._do(self._store.maintenance.note_branches)
        while not self._ended.wait(self._seconds):
            trim_heap()
            is_due = time.monotonic() - swept >= self._sweep_seconds
            if is_due:
                swept = time.monotonic()
            self._do(self._store.maintenance.forget_removed)
            if is_due:
                self._do(self._store.maintenance.sweep)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except LarderError as error:  # a disk that is full or slow today is looked at tomorrow
            self._store.parts.unwritten.note_error(error)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """What the C library has for that; None where it has nothing."""
    if platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None).malloc_trim


def trim_heap() -> bool:
    """Have the C library return unused pages of the whole process; whether there were any."""
    trimmer = _malloc_trim()
    return trimmer is not None and bool(trimmer(0))
