"""Measured rates of moves between the device and host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

MIN_MOVES, MAX_MOVES = 3, 16  # measurements that an estimate needs, and those that are kept
PROBE_INTERVAL = 16  # decisions after which a slow move is measured again


class HostMoveRates:
    """Measured rates of moves between the device and host memory.

    The quickest of the latest moves counts: the others waited for something else.
    """

    def __init__(self) -> None:
        self._rates = deque[float](maxlen=MAX_MOVES)  # bytes a second
        self._decisions = 0

    @contextmanager
    def measure(self, count: int) -> Iterator[None]:
        """Measure a move of `count` bytes."""
        started = perf_counter()
        yield
        seconds = perf_counter() - started
        if count > 0 and seconds > 0:
            self.note(count, seconds)

    def note(self, count: int, seconds: float) -> None:
        """Record a move."""
        self._rates.append(count / seconds)

    def is_slower(self, count: int, seconds: float) -> bool:
        """True if a move of `count` bytes takes longer than `seconds`, as far as is known."""
        if len(self._rates) < MIN_MOVES or count <= seconds * max(self._rates):
            return False
        self._decisions += 1
        return self._decisions % PROBE_INTERVAL != 0
