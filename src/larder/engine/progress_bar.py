"""Progress bars on a terminal's stderr, with rate and remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, RLock, Timer
from typing import TYPE_CHECKING

from larder.core.errors import BadParameter
from larder.core.progress import no_progress
from larder.engine.detokenizer import discard_text

if TYPE_CHECKING:
    import rich.progress

    from larder.core.progress import Progress

DELAY = 2.0  # seconds after which work without a progress callback shows a bar

_shown = Lock()  # held while a bar is on the terminal: a second one would overwrite it
_open: list[_Bar] = []  # bars that are open, drawn or not; the last one was opened last
FIELDS = ("count", "rate", "left")


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
def generation_progress(
    progress: Progress | None, on_text: Callable[[str], None]
) -> Iterator[Progress]:
    """Progress of generated tokens; without a bar where the caller shows the text itself.

    Raises:
        BadParameter: `progress` is not a function.
    """
    if progress is None and on_text is not discard_text:
        progress = no_progress
    with progress_or_bar(progress, "Generating", "tokens") as report:
        yield report


@contextmanager
def progress_bar(doing: str, unit: str = "", delay: float = 0.0) -> Iterator[Progress]:
    """Transient bar on stderr; absent where stderr is no terminal, or shows another bar.

    Yields a callback `(done, total)`. Before its first call the bar is indeterminate. A bar inside
    one that is not drawn yet is drawn in its place.

    Args:
        doing: label.
        unit: of `done` and `total`.
        delay: seconds that pass before the bar is shown; at 0 it is shown at once.
    """
    if not sys.stderr.isatty():
        yield no_progress
        return
    bar = _Bar(doing, unit, delay)
    try:
        yield bar.update
    finally:
        bar.close()


class _Bar:
    """Bar that is drawn once the delay has passed, by a timer or by a call, unless another one is
    on the terminal or was opened inside it."""

    def __init__(self, doing: str, unit: str, delay: float) -> None:
        self._doing, self._unit, self._delay = doing, unit, delay
        self._started = time.monotonic()
        self._drawn: rich.progress.Progress | None = None
        self._is_shown, self._is_closed = False, False
        self._drawing = RLock()
        self._timer = Timer(delay, self._draw)
        self._timer.daemon = True
        _open.append(self)
        if delay:
            self._timer.start()
        else:
            self._draw()

    def update(self, done: int, total: int) -> None:
        seconds = time.monotonic() - self._started
        if self._drawn is None and seconds >= self._delay:
            self._draw()
        if self._drawn is None:
            return
        count = f"{done:,}/{total:,} {self._unit}"
        rate = _rate(done / seconds) if done and seconds else ""
        left = f"{seconds / done * (total - done):,.0f} s left" if done else ""
        self._drawn.update(
            self._drawn.task_ids[0], completed=done, total=total, count=count, rate=rate, left=left
        )

    def close(self) -> None:
        self._timer.cancel()
        with self._drawing:
            self._is_closed = True
            _open.remove(self)
            if self._drawn is not None:
                self._drawn.stop()
            if self._is_shown:
                _shown.release()

    def _draw(self) -> None:
        with self._drawing:
            if self._is_closed or self._drawn is not None or _open[-1] is not self:
                return
            self._is_shown = _shown.acquire(blocking=False)
            if self._is_shown:
                self._start()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        fields = (TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in FIELDS)
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *fields,
            TimeElapsedColumn(),
            console=Console(file=sys.stderr, markup=False, highlight=False),
            transient=True,
        )
        bar.add_task(self._doing, total=None, **dict.fromkeys(FIELDS, ""))
        bar.start()
        self._drawn = bar


def _rate(per_second: float) -> str:
    """Rate with a decimal where it is small."""
    return f"{per_second:,.{0 if per_second >= 10 else 1}f}/s"
