"""Retry queue of turns that the store did not accept.

Each answer reports whether its turn is durable. A turn that is not exists in memory only: its
session stays there, the server counts as degraded, and the turn is written again every few seconds,
after a successful write of another session, and when the server closes. Under `Durability.STRICT`
such a turn is rolled back, and the request fails.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from larder.core.errors import LarderError
from larder.server.api_errors import turn_not_durable
from larder.server.model_thread import CompletionQueue
from larder.server.persistence.base import Durability, SessionPersistence
from larder.server.session_state import SessionState
from larder.store.failures import failure_reason

RETRY_SECONDS = 5.0
DEGRADED_SECONDS = 60.0  # after a failed write whose turn was rolled back


class WriteRetryQueue:
    """Sessions with turns to be written again. For the model's thread, except for `is_degraded`.

    `counts` has the turns that the store did not accept, by reason; retries do not count.

    Args:
        durability: decides if a turn that the store does not accept is rolled back.
        clock: seconds since 1970.
        wake: requests a step of the model's thread, from any thread.
    """

    def __init__(
        self,
        persistence: SessionPersistence,
        completions: CompletionQueue,
        durability: Durability,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._persistence, self._completions = persistence, completions
        self._is_strict = durability is Durability.STRICT
        self._clock, self._wake = clock, wake
        self._pending: dict[int, SessionState] = {}
        self._due, self._failing_until = math.inf, -math.inf
        self._alarm: threading.Timer | None = None
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Number of sessions with such turns."""
        return len(self._pending)

    @property
    def is_degraded(self) -> bool:
        """True if the store lacks answered turns, or has rejected one lately."""
        return bool(self._pending) or self._clock() < self._failing_until

    def durable(self, session: SessionState) -> bool | None:
        """True if the store has all turns of a session; None if that is unknown."""
        if session.durability.epoch and session.durability.turns == len(session.turns):
            return True
        return False if session.key in self._pending else None

    def outcome(
        self, session: SessionState, future: Future[LarderError | None] | None
    ) -> tuple[BaseException | None, bool | None]:
        """Outcome of a turn's write: the error that rolls it back, if any, and whether the turn is
        durable.

        Args:
            future: as returned by `SessionPersistence.commit`.
        """
        if future is None:
            return None, None
        error = future.exception()
        if error is None and self._is_strict and (why := future.result()) is not None:
            self.counts[failure_reason(why)] += 1
            self._failing_until = self._clock() + DEGRADED_SECONDS
            return turn_not_durable(why), False
        self.note(session, future)
        return error, error is None and future.result() is None

    def note(self, session: SessionState, future: Future[LarderError | None] | None) -> None:
        """Record the outcome of a write that no request waits for."""
        if future is None or future.exception() is not None:  # or superseded by another server
            self._pending.pop(session.key, None)
            return
        why = future.result()
        if why is not None:
            self.counts[failure_reason(why)] += 1
            self._pending[session.key] = session
        else:
            self._pending.pop(session.key, None)
            self._failing_until = -math.inf
        self._plan(0.0 if why is None else RETRY_SECONDS)

    def retry(self) -> None:
        """Write one session again, if a retry is due."""
        if self._clock() < self._due:
            return
        self._plan(RETRY_SECONDS)
        for session in self._pending.values():
            if not (session.usage.is_answering or session.durability.pending_writes):
                self._write(session)
                return

    def close(self) -> None:
        """Write all sessions a last time."""
        if self._alarm is not None:
            self._alarm.cancel()
        for session in list(self._pending.values()):
            self._write(session)

    def forget(self, session: SessionState) -> None:
        """Drop a session that leaves memory."""
        self._pending.pop(session.key, None)

    def _write(self, session: SessionState) -> None:
        written = self._persistence.commit(session, session.turns[-1])
        self._completions.track_write(session, written, partial(self._written, session))

    def _written(self, session: SessionState, future: Future[LarderError | None] | None) -> None:
        if future is None or future.exception() is not None or future.result() is None:
            self._pending.pop(session.key, None)
            self._plan(0.0)

    def _plan(self, seconds: float) -> None:
        """Schedule the next retry, if there are sessions left."""
        if not self._pending:
            self._due = math.inf
            return
        self._due = self._clock() + seconds
        if not seconds:
            self._wake()
        elif self._alarm is None or not self._alarm.is_alive():
            self._alarm = threading.Timer(seconds, self._wake)
            self._alarm.daemon = True
            self._alarm.start()
