"""Calls that take too long, and tiers that rest."""

from __future__ import annotations

import threading

import pytest

from larder.core import BadParameter, StoreError, StoreSlow
from larder.store import CallLimits, DeadlineExecutor

SHORT = 0.02


def fail() -> None:
    raise OSError(5, "broken")


def test_what_a_call_returns_or_raises_is_handed_on() -> None:
    guard = DeadlineExecutor("disk")
    assert guard.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        guard.call(divmod, 7, 0)


def test_a_call_that_hangs_is_left_and_gives_back_when_it_ends() -> None:
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
    go_on, begun, ended = threading.Event(), [], []
    before = threading.active_count()
    for number in range(5):
        with pytest.raises(StoreSlow):
            guard.call(
                lambda number=number: (begun.append(number), go_on.wait()),
                ended=lambda number=number: ended.append(number),
            )
    assert begun == [0, 1] and ended == [2, 3, 4] and threading.active_count() == before + 2
    go_on.set()


def test_a_tier_that_fails_rests_and_is_tried_again() -> None:
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


def test_calls_that_are_stopped_fail_at_once_and_give_back_when_they_end() -> None:
    guard = DeadlineExecutor("disk", CallLimits(seconds=60.0, calls=1))
    go_on, ended, raised = threading.Event(), list[int](), list[StoreSlow]()

    def wait(number: int) -> None:
        with pytest.raises(StoreSlow, match="had not answered when the process ended") as told:
            guard.call(go_on.wait, ended=lambda: ended.append(number))
        raised.append(told.value)

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


def test_a_missing_file_is_no_failure_of_the_disk(tmp_path: object) -> None:
    guard = DeadlineExecutor("disk", CallLimits(max_failures=1))
    with pytest.raises(FileNotFoundError):
        guard.call(open, f"{tmp_path}/nothing")
    assert not guard.breaker.is_open


def test_patience_is_above_zero() -> None:
    with pytest.raises(BadParameter, match="patience.seconds must be above 0, got 0"):
        CallLimits(seconds=0.0)
