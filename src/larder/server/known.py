"""The sessions that are kept of one tenant, found by what was said in them."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Known:
    """Names by two keys: of what a session began with, and of all that was said in it.

    Safe from threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[str, tuple[str, str]] = {}
        self._firsts: dict[str, dict[str, None]] = {}
        self._wholes: dict[str, dict[str, None]] = {}

    def add(self, name: str, first: str, whole: str) -> None:
        """A session has come to this; it is the one that was used last."""
        with self._lock:
            self._remove(name)
            self._keys[name] = first, whole
            for names, key in ((self._firsts, first), (self._wholes, whole)):
                names.setdefault(key, {})[name] = None

    def remove(self, name: str) -> None:
        """It is not kept any more; nothing happens where it is unknown."""
        with self._lock:
            self._remove(name)

    def found(self, firsts: Sequence[str], wholes: Sequence[str], most: int) -> list[str]:
        """Who may be meant by messages: those that they go on with, the longest first, then those
        that began alike, the one that was used last first.

        Args:
            firsts, wholes: the keys of their beginnings, from the shortest to the longest.
        """
        with self._lock:
            going_on = [self._wholes.get(key, {}) for key in reversed(wholes)]
            alike = [self._firsts.get(key, {}) for key in reversed(firsts)]
            told = [name for names in (*going_on, *alike) for name in reversed(names)]
        return list(dict.fromkeys(told))[:most]

    def _remove(self, name: str) -> None:
        keys = self._keys.pop(name, None)
        if keys is None:
            return
        for names, key in zip((self._firsts, self._wholes), keys, strict=True):
            del names[key][name]
            if not names[key]:
                del names[key]
