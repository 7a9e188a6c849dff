"""Progress bars: on a terminal alone, one at a time, and after a delay where nobody asked."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from larder.core import BadParameter
from larder.engine import progress_bar as module
from larder.engine import progress_or_bar
from larder.engine.progress_bar import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=stream))
    return stream


def test_no_output_when_stderr_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("Reading", "tokens") as update:
        update(1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as its only item."""
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_bar_appears_after_a_delay(terminal: Terminal, clock) -> None:
    with progress_or_bar(None, "Reading", "tokens") as update:
        clock[0] += 1.9
        update(1, 2000)
        assert terminal.getvalue() == ""
        clock[0] += 1.1
        update(600, 2000)
    text = terminal.getvalue()
    assert "600/2,000 tokens" in text
    assert "200/s" in text
    assert "7 s left" in text


def test_callback_of_the_caller_replaces_the_bar(terminal: Terminal) -> None:
    calls = []
    with progress_or_bar(lambda done, total: calls.append((done, total)), "Reading", "t") as update:
        update(1, 2)
    assert calls == [(1, 2)]
    assert terminal.getvalue() == ""


def test_nested_bar_is_silent(terminal: Terminal) -> None:
    with progress_bar("Outer", "cells") as outer, progress_bar("Inner", "tokens") as inner:
        outer(1, 3)
        inner(5, 7)
    assert "Outer" in terminal.getvalue() and "Inner" not in terminal.getvalue()
    with progress_bar("After", "cells") as after:
        after(1, 1)
    assert "After" in terminal.getvalue()


def test_bar_after_a_failed_one_is_shown(terminal: Terminal) -> None:
    with pytest.raises(ZeroDivisionError), progress_bar("Reading", "tokens"):
        raise ZeroDivisionError
    with progress_bar("Again", "tokens") as update:
        update(1, 1)
    assert "Again" in terminal.getvalue()


def test_invalid_callback_is_refused() -> None:
    with pytest.raises(BadParameter, match=r"progress must be a function .*, got 3 \(int\)"):
        with progress_or_bar(3, "Reading", "tokens"):  # pyright: ignore
            pass
