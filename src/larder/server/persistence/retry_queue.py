"""Turns that were answered and that the store did not take: counted, and written again later.

An answer tells whether its turn is durable. One that is not lives in memory alone: its session
stays there, the server counts as degraded, and the turn is written again every few seconds, when a
write of another session succeeds, and when the server closes. Under `Durability.STRICT` such a
turn is taken back, and the request fails.
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
DEGRADED_SECONDS = 60.0  # after a write failed whose turn was taken back


class WriteRetryQueue:
    """For the model's thread, except for `is_degraded`.

    `counts` has the turns that the store did not take, by reason; later tries do not count.

    Args:
        durability: by which a turn that the store does not take is told or taken back.
        clock: seconds since 1970.
        wake: has the model's thread make a step, from any thread.
    """

    def __init__(
        self,
        keeper: SessionPersistence,
        news: CompletionQueue,
        durability: Durability,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._keeper, self._news = keeper, news
        self._is_strict = durability is Durability.STRICT
        self._clock, self._wake = clock, wake
        self._held: dict[int, SessionState] = {}
        self._due, self._failing_until = math.inf, -math.inf
        self._alarm: threading.Timer | None = None
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Sessions that have such turns."""
        return len(self._held)

    @property
    def is_degraded(self) -> bool:
        """Whether the store lacks turns that were answered, or has refused one lately."""
        return bool(self._held) or self._clock() < self._failing_until

    def durable(self, sitting: SessionState) -> bool | None:
        """Whether the store has all turns of a session; None where that is not known."""
        if sitting.written and sitting.durable_turns == len(sitting.said):
            return True
        return False if sitting.key in self._held else None

    def outcome(
        self, sitting: SessionState, done: Future[LarderError | None] | None
    ) -> tuple[BaseException | None, bool | None]:
        """What becomes of a turn whose writing is over: the error by which it is to be taken back,
        if there is one, and whether it is durable.

        Args:
            done: as `Keeper.commit` returns it.
        """
        if done is None:
            return None, None
        error = done.exception()
        if error is None and self._is_strict and (why := done.result()) is not None:
            self.counts[failure_reason(why)] += 1
            self._failing_until = self._clock() + DEGRADED_SECONDS
            return turn_not_durable(why), False
        self.note(sitting, done)
        return error, error is None and done.result() is None

    def note(self, sitting: SessionState, done: Future[LarderError | None] | None) -> None:
        """The writing of a session is over for whose end nobody waits."""
        if done is None or done.exception() is not None:  # or somebody else has gone on with it
            self._held.pop(sitting.key, None)
            return
        why = done.result()
        if why is not None:
            self.counts[failure_reason(why)] += 1
            self._held[sitting.key] = sitting
        else:
            self._held.pop(sitting.key, None)
            self._failing_until = -math.inf
        self._plan(0.0 if why is None else RETRY_SECONDS)

    def retry(self) -> None:
        """Write a session again, if that is due."""
        if self._clock() < self._due:
            return
        self._plan(RETRY_SECONDS)
        for sitting in self._held.values():
            if not (sitting.is_answering or sitting.pending_writes):
                self._write(sitting)
                return

    def close(self) -> None:
        """Write all of them again, for the last time."""
        if self._alarm is not None:
            self._alarm.cancel()
        for sitting in list(self._held.values()):
            self._write(sitting)

    def forget(self, sitting: SessionState) -> None:
        """A session leaves memory."""
        self._held.pop(sitting.key, None)

    def _write(self, sitting: SessionState) -> None:
        written = self._keeper.commit(sitting, sitting.said[-1])
        self._news.track_write(sitting, written, partial(self._written, sitting))

    def _written(self, sitting: SessionState, done: Future[LarderError | None] | None) -> None:
        if done is None or done.exception() is not None or done.result() is None:
            self._held.pop(sitting.key, None)
            self._plan(0.0)

    def _plan(self, seconds: float) -> None:
        """Have the next session be written in a while, if there is one."""
        if not self._held:
            self._due = math.inf
            return
        self._due = self._clock() + seconds
        if not seconds:
            self._wake()
        elif self._alarm is None or not self._alarm.is_alive():
            self._alarm = threading.Timer(seconds, self._wake)
            self._alarm.daemon = True
            self._alarm.start()
