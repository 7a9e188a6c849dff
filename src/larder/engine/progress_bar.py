"""Progress bars on a terminal's stderr, with rate and remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from larder.core.errors import BadParameter

if TYPE_CHECKING:
    import rich.progress

    from larder.prefill.base import Progress

DELAY = 2.0  # seconds after which work that nobody watches shows a bar

_shown = Lock()  # held while a bar is on the terminal: a second one would overwrite it


@contextmanager
def progress_or_bar(progress: Progress | None, doing: str, unit: str) -> Iterator[Progress]:
    """The caller's callback; for None a bar that appears after two seconds.

    Raises:
        BadParameter: `progress` is not a function.
    """
    if progress is not None:
        if not callable(progress):
            raise BadParameter(
                f"progress must be a function of (done, total), got {progress!r} "
                f"({type(progress).__name__})."
            )
        yield progress
        return
    with progress_bar(doing, unit, DELAY) as update:
        yield update


@contextmanager
def progress_bar(doing: str, unit: str = "", delay: float = 0.0) -> Iterator[Progress]:
    """Transient bar on stderr; absent where stderr is no terminal, or shows another bar.

    Yields a callback `(done, total)`. Before its first call the bar is indeterminate.

    Args:
        doing: label.
        unit: of `done` and `total`.
        delay: seconds that pass before a call of the callback shows the bar; at 0 it is shown at
            once.
    """
    if not sys.stderr.isatty() or not _shown.acquire(blocking=False):
        yield lambda done, total: None
        return
    bar = _Bar(doing, unit, delay)
    try:
        yield bar.update
    finally:
        bar.close()
        _shown.release()


class _Bar:
    """Bar that is drawn once the delay has passed."""

    def __init__(self, doing: str, unit: str, delay: float) -> None:
        self._doing, self._unit, self._delay = doing, unit, delay
        self._started = time.monotonic()
        self._drawn: rich.progress.Progress | None = None
        if not delay:
            self._draw()

    def update(self, done: int, total: int) -> None:
        seconds = time.monotonic() - self._started
        if self._drawn is None:
            if seconds < self._delay:
                return
            self._draw()
        assert self._drawn is not None
        count = f"{done:,}/{total:,} {self._unit}"
        rate = f"{done / seconds:,.0f}/s" if done and seconds else ""
        left = f"{seconds / done * (total - done):,.0f} s left" if done else ""
        self._drawn.update(
            self._drawn.task_ids[0], completed=done, total=total, count=count, rate=rate, left=left
        )

    def close(self) -> None:
        if self._drawn is not None:
            self._drawn.stop()

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        fields = (TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in FIELDS)
        self._drawn = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *fields,
            TimeElapsedColumn(),
            console=Console(file=sys.stderr, markup=False, highlight=False),
            transient=True,
        )
        self._drawn.add_task(self._doing, total=None, **dict.fromkeys(FIELDS, ""))
        self._drawn.start()


FIELDS = ("count", "rate", "left")
