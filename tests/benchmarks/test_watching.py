"""What the benchmark of costs makes of its clocks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("_watching")


def test_shares_are_of_the_watched_step(watching: Any) -> None:
    shares = watching.shares_of(judging=1.0, watched=8.0, alone=6.0)
    assert shares["share"] == 1 / 8
    assert shares["difference_share"] == 2 / 8


def test_a_window_weighs_steps_by_how_many_there_are(watching: Any) -> None:
    due = watching.shares_of(judging=4.0, watched=10.0, alone=6.0)
    quiet = watching.shares_of(judging=1.0, watched=7.0, alone=6.0)
    mean = watching.over_window(due, quiet, excess=2)  # one step and two
    assert [mean[name] for name in ("judging_s", "watched_s", "alone_s")] == [2.0, 8.0, 6.0]
    assert mean["share"] == 2 / 8
    assert mean["difference_share"] == 2 / 8


def test_a_watch_adds_up_what_its_observer_takes(watching: Any) -> None:
    times = iter([1.0, 1.5, 10.0, 12.0])
    calls: list[tuple[int, int]] = []
    watch = watching.Watch(lambda: next(times), lambda row, layer, seen: calls.append((row, layer)))
    watch(0, 3, None)
    watch(0, 4, None)
    assert watch.seconds == 2.5
    assert watch.stopped == 12.0
    assert calls == [(0, 3), (0, 4)]
