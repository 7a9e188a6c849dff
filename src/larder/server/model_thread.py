"""The one thread that owns the model: others hand it what is to be done between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from larder.server.api_errors import server_stopping
from larder.server.session_state import SessionState

T = TypeVar("T")


class ModelThread:
    """Runs steps while there is anything to do, and calls in between. Safe from any thread.

    Args:
        step: one step; False where there was nothing to do.
        end: called once, last of all, when the thread stops for whatever reason.
    """

    def __init__(self, step: Callable[[], bool], end: Callable[[], None]) -> None:
        self._step, self._end = step, end
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._has_news, self._is_closing = False, False
        self._thread = threading.Thread(target=self._run, name="larder model", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it takes calls."""
        return self._thread.is_alive() and not self._is_closing

    def call(self, function: Callable[[], T]) -> T:
        """Have the model's thread do something between two steps, and wait for it.

        Raises:
            Refusal: the thread stops or has stopped.
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

    def wake(self) -> None:
        """Something has changed that a step would look at."""
        with self._changed:
            self._has_news = True
            self._changed.notify()

    def close(self) -> None:
        """Stop after the step that is going on, and wait until it has."""
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
                    while not (is_working or self._calls or self._has_news or self._is_closing):
                        self._changed.wait()
                    self._has_news = False
                    calls = list(self._calls)
                    self._calls.clear()
                for future, function in calls:
                    _answer(future, function)
                is_working = self._step()
        finally:
            self._stop()

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
    """Whoever asked gets what comes of it, errors included."""
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


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

    def track_write(
        self,
        sitting: SessionState,
        future: Future[Any] | None,
        then: Callable[[Future[Any] | None], None],
    ) -> None:
        """As `hear`, for what a session owes the store until then; at once without one."""
        if future is None:
            then(None)
            return
        sitting.pending_writes += 1

        def heard(done: Future[Any]) -> None:
            sitting.pending_writes -= 1
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
