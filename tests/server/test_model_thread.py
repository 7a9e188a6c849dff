"""Model's thread: calls that come at the same time, before a step."""

from __future__ import annotations

import threading

import pytest

from larder.server import ModelThread, model_thread


@pytest.fixture
def long_wait(monkeypatch) -> None:
    """Let calls from anywhere in a test come at the same time."""
    monkeypatch.setattr(model_thread, "ARRIVAL_GAP_SECONDS", 60.0)
    monkeypatch.setattr(model_thread, "MAX_ARRIVAL_SECONDS", 60.0)


def test_calls_at_once_are_all_run_before_the_next_step(long_wait) -> None:
    events = list[str]()
    thread = ModelThread(lambda: bool(events.append("step")), lambda: None)
    for name in ("first", "second", "third"):
        thread.call(lambda name=name: events.append(name))
    thread.close()
    assert events == ["first", "second", "third", "step"]


def test_wait_for_further_calls_ends_at_its_limit(monkeypatch, long_wait) -> None:
    monkeypatch.setattr(model_thread, "MAX_ARRIVAL_SECONDS", 0.0)
    stepped = threading.Event()
    thread = ModelThread(lambda: bool(stepped.set()), lambda: None)
    thread.call(lambda: None)
    assert stepped.wait(60)
    thread.close()


def test_work_in_progress_does_not_wait_for_calls(long_wait) -> None:
    goes_on, stepped = threading.Event(), threading.Semaphore(0)

    def step() -> bool:
        stepped.release()
        return not goes_on.wait(0.001)

    thread = ModelThread(step, lambda: None)
    thread.wake()  # without a call
    assert stepped.acquire(timeout=30)
    for _ in range(3):
        thread.call(lambda: None)
        assert stepped.acquire(timeout=30)
    goes_on.set()
    thread.close()


def test_a_call_that_is_announced_is_waited_for(monkeypatch, long_wait) -> None:
    monkeypatch.setattr(model_thread, "ARRIVAL_GAP_SECONDS", 0.001)
    events, stepped = list[str](), threading.Event()

    def step() -> bool:
        events.append("step")
        stepped.set()
        return False

    thread = ModelThread(step, lambda: None)
    with thread.announce() as first, thread.announce() as second:
        thread.call(lambda: events.append("first"))
        first.end()
        first.end()  # counts once
        assert not stepped.wait(0.05)
        thread.call(lambda: events.append("second"))
        second.end()
    assert stepped.wait(60)
    thread.close()
    assert events[:3] == ["first", "second", "step"]
