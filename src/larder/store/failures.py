"""Why saved caches were not used, or not saved: counted by reason, and logged."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from larder.core.errors import (
    BudgetError,
    Damaged,
    LarderError,
    Refused,
    StoreFull,
    StoreSlow,
    Superseded,
)

_LOG = logging.getLogger("larder.store")
# The word by which an error is counted; `Refused` brings its own.
_REASONS: tuple[tuple[type[LarderError], str], ...] = (
    (Damaged, "damaged"),
    (StoreSlow, "slow"),
    (StoreFull, "full"),
    (Superseded, "superseded"),
    (BudgetError, "budget"),
)


class FailureCounter:
    """Counts since the store was opened. Safe from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def note(self, reason: str, said: str) -> str:
        """One more; the reason."""
        with self._lock:
            self._counts[reason] += 1
        _LOG.warning("%s: %s", reason, said)
        return reason

    def note_error(self, error: LarderError) -> str:
        """One more, for an error; its reason."""
        return self.note(failure_reason(error), str(error))

    @contextmanager
    def suppressed(self) -> Iterator[None]:
        """A block whose errors are one more each, and stop nobody."""
        try:
            yield
        except LarderError as error:
            self.note_error(error)

    def counts(self) -> dict[str, int]:
        """How often for each reason."""
        with self._lock:
            return dict(self._counts)


def failure_reason(error: LarderError) -> str:
    """The word by which an error is counted."""
    if isinstance(error, Refused):
        return error.reason
    return next((word for kind, word in _REASONS if isinstance(error, kind)), "failed")
