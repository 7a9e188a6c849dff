"""Failed restores and failed writes, counted by reason and logged."""

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
# Reasons that are no fault: what was saved before an option changed is not used.
_EXPECTED = frozenset({"policy"})


class ReasonCounter:
    """Counter by reason. Safe from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """Count one occurrence."""
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> dict[str, int]:
        """Occurrences by reason."""
        with self._lock:
            return dict(self._counts)


class FailureCounter(ReasonCounter):
    """Failure counts since the store was opened. Safe from threads."""

    def note(self, reason: str, message: str) -> str:
        """Count and log a failure, one that is no fault as information; return its reason."""
        self.count(reason)
        level = logging.INFO if reason in _EXPECTED else logging.WARNING
        _LOG.log(level, "%s: %s", reason, message)
        return reason

    def note_error(self, error: LarderError) -> str:
        """Count and log an error; return its reason."""
        return self.note(failure_reason(error), str(error))

    @contextmanager
    def suppressed(self) -> Iterator[None]:
        """Context in which errors are counted and suppressed."""
        try:
            yield
        except LarderError as error:
            self.note_error(error)


def failure_reason(error: LarderError) -> str:
    """Reason under which an error is counted."""
    if isinstance(error, Refused):
        return error.reason
    return next((word for kind, word in _REASONS if isinstance(error, kind)), "failed")
