"""Deadlines (timeouts) and circuit breaker for calls to a storage tier.

A call past its deadline continues in its thread, which cannot be stopped; the number of calls in
progress is bounded, and what they hold is released when they end.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from larder.core.arguments import require
from larder.core.errors import StoreError, StoreFull, StoreSlow

Result = TypeVar("Result")
# Work of a thread; what it returns is called once the thread takes other work.
Task = Callable[[], Callable[[], None]]

IDLE_SECONDS = 5.0  # after which an idle thread ends
# Errors that a working disk raises, too.
EXPECTED_ERRORS = (FileNotFoundError, FileExistsError)
# Errors of a full or read-only disk.
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)
MAX_PARALLEL_CALLS = 8


def no_op() -> None:
    """Callback for calls that hold nothing."""


@dataclass(frozen=True)
class CallLimits:
    """Limits of calls to a tier.

    Args:
        seconds: time limit of one call.
        calls: limit of concurrent calls, including calls past their deadline.
        max_failures: consecutive failures that open the circuit breaker.
        rest_seconds: time that the breaker stays open; then one trial call is let through.
    """

    seconds: float = 30.0
    calls: int = 16
    max_failures: int = 3
    rest_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("seconds", "calls", "max_failures"):
            require(getattr(self, name) > 0, f"limits.{name}", "above 0", getattr(self, name))


class CircuitBreaker:
    """Circuit breaker that opens after consecutive failures. Safe from threads."""

    def __init__(self, limits: CallLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._rests_until = 0.0

    @property
    def is_open(self) -> bool:
        """True if calls are refused; the first call after the rest is let through as a trial."""
        with self._lock:
            if self._failures < self._limits.max_failures:
                return False
            now = self._clock()
            if now < self._rests_until:
                return True
            self._rests_until = now + self._limits.rest_seconds  # one trial call
            return False

    def record_success(self) -> None:
        """Record a call that returned."""
        with self._lock:
            self._failures = 0

    def failed(self) -> None:
        """Record a call that timed out or failed with a disk error."""
        with self._lock:
            self._failures += 1
            self._rests_until = self._clock() + self._limits.rest_seconds


class DaemonThreads:
    """Threads that run one task each, and the next while they last: starting one takes longer than
    most calls. Safe from threads.

    They are daemons, so that a call that hangs does not keep the process alive.
    """

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()
        self._idle = list[SimpleQueue[Task]]()

    def run(self, task: Task) -> None:
        """Run a task in an idle thread, or in a new one."""
        with self._lock:
            if self._process != os.getpid():  # a fork has no threads but its own
                self._process, self._idle = os.getpid(), []
            inbox = self._idle.pop() if self._idle else None
        if inbox is not None:
            inbox.put(task)
            return
        inbox = SimpleQueue[Task]()
        inbox.put(task)
        threading.Thread(
            target=self._serve, args=(inbox,), daemon=True, name="larder-store"
        ).start()

    def _serve(self, inbox: SimpleQueue[Task]) -> None:
        while True:
            try:
                finish = inbox.get(timeout=IDLE_SECONDS)()
            except Empty:
                with self._lock:
                    if inbox not in self._idle:  # a task is on its way
                        continue
                    self._idle.remove(inbox)
                    return
            with self._lock:
                self._idle.append(inbox)
            finish()
            del finish  # an idle thread holds no result


class DeadlineExecutor:
    """Executor of calls to one tier under deadlines. Safe from threads.

    Args:
        tier: name in errors.
    """

    def __init__(
        self,
        tier: str,
        limits: CallLimits = CallLimits(),  # noqa: B008, frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier, self.limits = tier, limits
        self.breaker = CircuitBreaker(limits, clock)
        self._room = threading.Semaphore(limits.calls)
        self._lock = threading.Lock()
        self._calls, self._threads = set[Future[Any]](), DaemonThreads()
        self._is_stopped = False

    def stop(self) -> None:
        """Fail all calls in progress and all later ones at once, because the process ends."""
        with self._lock:
            self._is_stopped = True
            waiting = list(self._calls)
        self._room.release(self.limits.calls)  # wakes threads that wait for a place, too
        for call in waiting:
            with suppress(InvalidStateError):  # it has just ended
                call.set_exception(self._stopped_error())

    def call(
        self, function: Callable[..., Result], *args: Any, ended: Callable[[], None] = no_op
    ) -> Result:
        """Call a function in a thread and return its result within the time limit.

        Args:
            ended: called once when the function has ended, possibly after the time limit; or
                immediately if it was not started.

        Raises:
            StoreSlow: the call took too long, the breaker is open, or calls were stopped.
            StoreFull: the tier is full or read-only.
            StoreError: it fails.
            FileNotFoundError, FileExistsError: raised by the function.
        """
        left, call = self._admit(function, ended), Future[Result]()

        def run() -> Callable[[], None]:
            outcome: Result | None = None
            error: BaseException | None = None
            try:
                outcome = function(*args)
            except BaseException as caught:  # raised again in the waiting thread
                error = caught
            self._room.release()
            ended()
            return partial(_settle, call, outcome, error)

        if not self._start(call, run):
            self._room.release()
            ended()
            raise self._stopped_error()
        return self._result(call, left, function)

    def _admit(self, function: Callable[..., Any], ended: Callable[[], None]) -> float:
        """Seconds that are left of the limit when a call has a place.

        Raises:
            StoreSlow: the breaker is open, or no place became free in time.
        """
        if self.breaker.is_open:
            ended()
            raise StoreSlow(
                f"The {self.tier} tier failed {self.limits.max_failures} times in a row and rests: "
                f"it is tried again within {self.limits.rest_seconds:g} s."
            )
        start = time.monotonic()
        if not self._room.acquire(timeout=self.limits.seconds):
            ended()
            self.breaker.failed()
            raise self._late(function)
        return self.limits.seconds - (time.monotonic() - start)

    def _result(self, call: Future[Result], seconds: float, function: Callable[..., Any]) -> Result:
        """Result of a started call; its failure is recorded."""
        try:
            error = call.exception(max(seconds, 0))
        except TimeoutError:
            self.breaker.failed()
            raise self._late(function) from None
        finally:
            with self._lock:
                self._calls.discard(call)
        if isinstance(error, OSError) and not isinstance(error, EXPECTED_ERRORS):
            self.breaker.failed()
            raise self._disk_error(error) from error
        self.breaker.record_success()
        return call.result()

    def _start(self, call: Future[Any], run: Task) -> bool:
        """Run a call in a thread; false if calls were stopped."""
        with self._lock:
            if self._is_stopped:
                return False
            self._calls.add(call)
        self._threads.run(run)
        return True

    def _stopped_error(self) -> StoreSlow:
        return StoreSlow(f"The {self.tier} tier had not answered when the process ended.")

    def _disk_error(self, error: OSError) -> StoreError:
        if error.errno in DISK_FULL_ERRNOS:
            return StoreFull(
                f"The {self.tier} tier cannot be written ({error.strerror}): make room, see to its "
                "permissions, or take another store. What was saved before is untouched."
            )
        return StoreError(
            f"The {self.tier} tier fails ({error.strerror or error}): see whether its "
            "disk or server is well. What was saved before is untouched."
        )

    def _late(self, function: Callable[..., Any]) -> StoreSlow:
        return StoreSlow(
            f"The {self.tier} tier did not answer {function.__name__} within "
            f"{self.limits.seconds:g} s: see whether its disk or server is well."
        )


def _settle(call: Future[Any], outcome: Any, error: BaseException | None) -> None:
    """Hand the outcome of a call on; one that was stopped meanwhile has another."""
    with suppress(InvalidStateError):
        if error is None:
            call.set_result(outcome)
        else:
            call.set_exception(error)


Item = TypeVar("Item")
CallResult = TypeVar("CallResult")


def parallel_map(function: Callable[[Item], CallResult], items: Iterable[Item]) -> list[CallResult]:
    """Results of a function over items in threads; an error is raised after all calls have
    ended.
    """
    inputs = list(items)
    if len(inputs) < 2:
        return [function(each) for each in inputs]
    with ThreadPoolExecutor(min(MAX_PARALLEL_CALLS, len(inputs))) as pool:
        futures = [pool.submit(function, each) for each in inputs]
    return [future.result() for future in futures]
