"""What other threads have finished, for the model's thread to hear between two steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from larder.server.session_state import SessionState


class CompletionQueue:
    """For the model's thread; only what it waits for comes from others.

    `in_flight` counts what was not heard yet.

    Args:
        wake: told, from any thread, that there are some.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._arrived: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.in_flight = 0

    def hear(self, future: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        """Have something done on the model's thread once another thread is done."""
        self.in_flight += 1
        future.add_done_callback(lambda done: self._arrive(lambda: then(done)))

    def owe(
        self,
        sitting: SessionState,
        future: Future[Any] | None,
        then: Callable[[Future[Any] | None], None],
    ) -> None:
        """As `hear`, for what a session owes the store until then; at once without one."""
        if future is None:
            then(None)
            return
        sitting.owed += 1

        def heard(done: Future[Any]) -> None:
            sitting.owed -= 1
            then(done)

        self.hear(future, heard)

    def tell(self) -> bool:
        """Do what has become possible; whether there was anything."""
        was_any = False
        while True:
            try:
                act = self._arrived.get_nowait()
            except Empty:
                return was_any
            was_any = True
            self.in_flight -= 1
            act()

    def drain(self) -> None:
        """Wait for everything that is on its way, and do what follows."""
        while self.in_flight:
            act = self._arrived.get()
            self.in_flight -= 1
            act()

    def _arrive(self, act: Callable[[], None]) -> None:
        self._arrived.put(act)
        self._wake()
