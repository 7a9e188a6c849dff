"""Sessions that are being removed: what was read of them before does not bring them back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class PendingRemovals:
    """Safe from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._ended = 0

    @property
    def ended(self) -> int:
        """How many have come to an end; if there are more than before something was read, a session
        that was removed may have been read."""
        with self._lock:
            return self._ended

    def has(self, tenant: str, name: str) -> bool:
        """Whether a session is being removed."""
        with self._lock:
            return self._under_way[tenant, name] > 0

    def begin(self, tenant: str, names: Iterable[str]) -> None:
        """Sessions are out of memory, and about to leave where they are kept."""
        with self._lock:
            self._under_way.update((tenant, name) for name in names)

    def end(self, tenant: str, names: Iterable[str]) -> None:
        """They have left, or could not."""
        with self._lock:
            self._under_way.subtract((tenant, name) for name in names)
            self._under_way = +self._under_way
            self._ended += 1
