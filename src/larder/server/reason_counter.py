"""How often something has happened, by why."""

from __future__ import annotations

import threading
from collections import Counter


class ReasonCounter:
    """Since the server started. Safe from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def note(self, why: str) -> None:
        """Once more."""
        with self._lock:
            self._counts[why] += 1

    def told(self) -> dict[str, int]:
        """How often for each reason."""
        with self._lock:
            return dict(self._counts)
