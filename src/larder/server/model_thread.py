"""Thread that owns the model, and the queue of completions that it processes between two steps."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from larder.server.api_errors import server_stopping
from larder.server.request import Arrival
from larder.server.session_state import SessionState

T = TypeVar("T")

# Seconds without a call that end the wait for requests that come at once, unless one is announced,
# and the longest wait.
ARRIVAL_GAP_SECONDS, MAX_ARRIVAL_SECONDS = 0.004, 0.1


class AnnouncedCall(Arrival):
    """Announcement of a call, for which a model's thread without work waits.

    Args:
        add: changes the number of announced calls.
    """

    def __init__(self, add: Callable[[int], None]) -> None:
        self._add, self._has_ended = add, False
        add(1)

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._add(-1)


class ModelThread:
    """Thread that runs steps while there is work, and calls in between. Safe from any thread.

    A call that finds no work waits for others that come at the same time or are announced before
    the next step, so that the prompts of several requests are read together.

    Args:
        step: one step; False if there was nothing to do.
        end: called once when the thread stops, for whatever reason.
    """

    def __init__(self, step: Callable[[], bool], end: Callable[[], None]) -> None:
        self._step, self._end = step, end
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._is_woken, self._is_closing = False, False
        self._num_announced = 0
        self._thread = threading.Thread(target=self._run, name="larder model", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True if calls are accepted."""
        return self._thread.is_alive() and not self._is_closing

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the model's thread between two steps, and wait for its result.

        Raises:
            ApiError: 503 `stopping`.
        """
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()
        with self._changed:
            if not self.is_alive:
                raise server_stopping()
            self._calls.append((future, function))
            self._changed.notify()
        return future.result()

    def announce(self) -> Arrival:
        """Announce a call that comes soon."""
        return AnnouncedCall(self._add_announced)

    def _add_announced(self, change: int) -> None:
        with self._changed:
            self._num_announced += change

    def wake(self) -> None:
        """Request a step: something has changed."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def close(self) -> None:
        """Stop after the current step, and wait for the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        is_working = False
        try:
            while not self._is_closing:
                with self._changed:
                    while not (is_working or self._calls or self._is_woken or self._is_closing):
                        self._changed.wait()
                    self._is_woken = False
                was_called = self._run_calls()
                if was_called and not is_working:
                    self._run_simultaneous_calls()
                is_working = self._step()
        finally:
            self._stop()

    def _run_calls(self) -> bool:
        """Run the calls that are waiting; True if there were any."""
        with self._changed:
            calls = list(self._calls)
            self._calls.clear()
        for future, function in calls:
            _answer(future, function)
        return bool(calls)

    def _run_simultaneous_calls(self) -> None:
        """Run calls that come within `ARRIVAL_GAP_SECONDS` of each other or are announced, for at
        most `MAX_ARRIVAL_SECONDS`."""
        until = monotonic() + MAX_ARRIVAL_SECONDS
        while (seconds := min(ARRIVAL_GAP_SECONDS, until - monotonic())) > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._is_closing, seconds)
                is_announced = self._num_announced > 0
            if self._is_closing or not (self._run_calls() or is_announced):
                return

    def _stop(self) -> None:
        with self._changed:
            self._is_closing = True
            calls = list(self._calls)
            self._calls.clear()
        try:
            self._end()
        finally:
            for future, _ in calls:
                future.set_exception(server_stopping())


def _answer(future: Future[T], function: Callable[[], T]) -> None:
    """Set the future to the function's result or error."""
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class CompletionQueue:
    """Callbacks of futures of other threads, run on the model's thread.

    `in_flight` counts callbacks that have not run yet.

    Args:
        wake: called, from any thread, when one is ready.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._arrived: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.in_flight = 0

    def when_done(self, future: Future[Any], callback: Callable[[Future[Any]], None]) -> None:
        """Run `callback` on the model's thread once the future is done."""
        self.in_flight += 1
        future.add_done_callback(lambda done: self._arrive(lambda: callback(done)))

    def track_write(
        self,
        session: SessionState,
        future: Future[Any] | None,
        callback: Callable[[Future[Any] | None], None],
    ) -> None:
        """`when_done` for a write of a session, counted in `pending_writes`; without a future
        `callback` runs at once."""
        if future is None:
            callback(None)
            return
        session.durability.pending_writes += 1

        def on_written(future: Future[Any]) -> None:
            session.durability.pending_writes -= 1
            callback(future)

        self.when_done(future, on_written)

    def run_ready(self) -> bool:
        """Run callbacks that are ready; true if there were any."""
        was_any = False
        while True:
            try:
                act = self._arrived.get_nowait()
            except Empty:
                return was_any
            was_any = True
            self.in_flight -= 1
            act()

    def drain(self, until: float = math.inf) -> None:
        """Wait for all futures, at most until a time of `monotonic`, and run their callbacks."""
        while self.in_flight:
            seconds = None if until == math.inf else max(until - monotonic(), 0.0)
            try:
                act = self._arrived.get(timeout=seconds)
            except Empty:
                return
            self.in_flight -= 1
            act()

    def _arrive(self, act: Callable[[], None]) -> None:
        self._arrived.put(act)
        self._wake()
