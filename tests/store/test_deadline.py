"""Deadlines of store calls, and the circuit breaker of a tier."""

from __future__ import annotations

import os
import threading
import weakref

import pytest

from larder.core import BadParameter, StoreError, StoreSlow
from larder.store import CallLimits, DeadlineExecutor
from larder.store.fs import deadline

SHORT = 0.02


def fail() -> None:
    raise OSError(5, "broken")


def threads_since(before: list[threading.Thread]) -> list[threading.Thread]:
    """Threads that have begun since."""
    return [each for each in threading.enumerate() if each not in before]


def test_result_or_exception_of_a_call_is_passed_on() -> None:
    guard = DeadlineExecutor("disk")
    assert guard.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        guard.call(divmod, 7, 0)


def test_hanging_call_times_out_and_releases_its_slot_at_its_end() -> None:
    guard = DeadlineExecutor("disk", CallLimits(seconds=SHORT))
    go_on, ended = threading.Event(), threading.Event()
    with pytest.raises(StoreSlow, match="did not answer wait within 0.02 s"):
        guard.call(go_on.wait, ended=ended.set)
    assert not ended.is_set()
    assert guard.call(divmod, 7, 2) == (3, 1)  # others are not held up
    go_on.set()
    assert ended.wait(5)


def test_hanging_calls_are_bounded() -> None:
    guard = DeadlineExecutor("disk", CallLimits(seconds=SHORT, calls=2, max_failures=100))
    go_on, started, ended = threading.Event(), [], []
    before = threading.enumerate()
    for number in range(5):
        with pytest.raises(StoreSlow):
            guard.call(
                lambda number=number: (started.append(number), go_on.wait()),
                ended=lambda number=number: ended.append(number),
            )
    assert started == [0, 1] and ended == [2, 3, 4] and len(threads_since(before)) == 2
    go_on.set()


def test_sequential_calls_share_a_thread_that_keeps_no_result() -> None:
    guard, results = DeadlineExecutor("disk"), list[weakref.ref[threading.Event]]()

    def made() -> threading.Event:
        found = threading.Event()
        results.append(weakref.ref(found))
        return found

    guard.call(made)
    threads = {guard.call(threading.get_ident) for _ in range(50)}
    assert len(threads) == 1
    guard.call(divmod, 7, 2)
    assert results[0]() is None


def test_idle_threads_end_and_later_calls_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "IDLE_SECONDS", 0.0)
    guard, before = DeadlineExecutor("disk"), threading.enumerate()
    for number in range(200):  # some calls meet a thread that is about to end
        assert guard.call(divmod, number, 2) == divmod(number, 2)
    for thread in threads_since(before):
        thread.join(5)
    assert not threads_since(before)
    assert guard.call(divmod, 7, 2) == (3, 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_process_starts_its_own_threads() -> None:
    guard = DeadlineExecutor("disk", CallLimits(seconds=5.0))
    assert guard.call(divmod, 7, 2) == (3, 1)
    child = os.fork()
    if not child:
        status = 1
        try:
            status = guard.call(divmod, 7, 2)[0]
        finally:  # never go on as a second run of the tests
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_breaker_opens_after_failures_and_retries() -> None:
    now = [0.0]
    guard = DeadlineExecutor(
        "disk", CallLimits(max_failures=2, rest_seconds=10.0), clock=lambda: now[0]
    )
    for _ in range(2):
        with pytest.raises(StoreError, match="disk tier fails .broken."):
            guard.call(fail)
    ended: list[int] = []
    with pytest.raises(StoreSlow, match="rests"):
        guard.call(divmod, 7, 2, ended=lambda: ended.append(1))
    assert ended == [1]
    now[0] = 11.0
    assert not guard.breaker.is_open and guard.breaker.is_open  # one tries, others still wait
    now[0] = 22.0
    assert guard.call(divmod, 7, 2) == (3, 1)
    assert guard.call(divmod, 7, 2) == (3, 1)


def test_stop_fails_running_and_waiting_calls_at_once() -> None:
    guard = DeadlineExecutor("disk", CallLimits(seconds=60.0, calls=1))
    go_on, ended, raised = threading.Event(), list[int](), list[StoreSlow]()

    def wait(number: int) -> None:
        with pytest.raises(StoreSlow, match="had not answered when the process ended") as result:
            guard.call(go_on.wait, ended=lambda: ended.append(number))
        raised.append(result.value)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads:  # one hangs, the others wait for its place
        thread.start()
        while not guard._calls:
            pass
    guard.stop()
    for thread in threads:
        thread.join(5)
    assert len(raised) == 3 and sorted(ended) == [1, 2]
    with pytest.raises(StoreSlow):
        guard.call(divmod, 7, 2)
    go_on.set()


def test_missing_file_does_not_open_the_breaker(tmp_path: object) -> None:
    guard = DeadlineExecutor("disk", CallLimits(max_failures=1))
    with pytest.raises(FileNotFoundError):
        guard.call(open, f"{tmp_path}/nothing")
    assert not guard.breaker.is_open


def test_limits_are_above_zero() -> None:
    with pytest.raises(BadParameter, match="limits.seconds must be above 0, got 0"):
        CallLimits(seconds=0.0)
