"""The sessions that are kept of one tenant, found by what was said in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial


class SessionNameIndex:
    """Names by two keys: of what a session began with, and of all that was said in it.

    Safe from threads. It knows nothing before `load`, which takes as long as there are sessions:
    what changes meanwhile waits for it, and whoever changes it does not.
    """

    def __init__(self) -> None:
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._is_loaded = False
        self._late: list[Callable[[], None]] | None = None  # changes while it is being loaded
        self._keys: dict[str, tuple[str, str]] = {}
        self._firsts: dict[str, dict[str, None]] = {}
        self._wholes: dict[str, dict[str, None]] = {}

    def load(self, read: Callable[[], Iterable[tuple[str, str, str]]]) -> None:
        """Have it know the sessions that there are, once.

        Args:
            read: finds their names, each with its two keys, the one that was used last last. What
                it fails with is passed on; then it is asked again the next time.
        """
        with self._loading:
            if self._is_loaded:
                return
            with self._lock:
                self._late = []
            try:
                found = list(read())
            except BaseException:
                with self._lock:
                    self._late = None
                raise
            with self._lock:
                for told in found:
                    self._add(*told)
                for change in self._late:
                    change()
                self._late, self._is_loaded = None, True

    def add(self, name: str, first: str, whole: str) -> None:
        """A session has come to this; it is the one that was used last."""
        self._change(partial(self._add, name, first, whole))

    def remove(self, name: str) -> None:
        """It is not kept any more; nothing happens where it is unknown."""
        self._change(partial(self._remove, name))

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

    def _change(self, change: Callable[[], None]) -> None:
        with self._lock:
            if self._is_loaded:
                change()
            elif self._late is not None:  # else whoever loads it finds it changed
                self._late.append(change)

    def _add(self, name: str, first: str, whole: str) -> None:
        self._remove(name)
        self._keys[name] = first, whole
        for names, key in ((self._firsts, first), (self._wholes, whole)):
            names.setdefault(key, {})[name] = None

    def _remove(self, name: str) -> None:
        keys = self._keys.pop(name, None)
        if keys is None:
            return
        for names, key in zip((self._firsts, self._wholes), keys, strict=True):
            del names[key][name]
            if not names[key]:
                del names[key]
