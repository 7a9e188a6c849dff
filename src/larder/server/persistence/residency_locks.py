"""Sessions that somebody is about to use: they stay in memory until then."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from larder.core.session_name import root_name
from larder.server.session_state import SessionState


class ResidencyLocks:
    """Safe from threads."""

    def __init__(self) -> None:
        self._families: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def these(self, tenant: str, *names: str | None) -> Iterator[None]:
        """While a tenant's sessions are awaited, with all that began as they did."""
        families = [(tenant, root_name(name)) for name in names if name is not None]
        with self._lock:
            self._families.update(families)
        try:
            yield
        finally:
            with self._lock:
                self._families.subtract(families)
                self._families = +self._families

    def has(self, sitting: SessionState) -> bool:
        """Whether somebody is about to use a session, or one of its family."""
        with self._lock:
            return self._families[sitting.tenant, sitting.root] > 0
