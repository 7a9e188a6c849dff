"""Which sessions are branches of which, for any machine that has one of them.

    families/<tenant>/<root>/<branch>.json

A session whose label `ROOT` names another one is noted here before its first state is written, and
forgotten when it is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

from larder.core.errors import Damaged, Refused
from larder.store.container import canonical, parsed
from larder.store.deadline import Guard
from larder.store.digests import same, seal_of
from larder.store.places import Entry, Place
from larder.store.records import ROOT, Record, session_key

FOLDER = "families"


class Families:
    """Safe from threads and processes.

    Args:
        place: where notes lie.
    """

    def __init__(self, place: Place, guard: Guard, secret: bytes) -> None:
        self._place, self._guard, self._secret = place, guard, secret

    def note(self, record: Record) -> None:
        """Note a session, if it is a branch."""
        path = _path(record)
        if path is None:
            return
        data = canonical({"name": record.name, "seal": self._seal(path, record.name)}).encode()
        with suppress(FileExistsError):
            self._guard.call(self._place.create, path, data)

    def note_all(self, records: Iterable[Record]) -> None:
        """The same for many, most of which are noted."""
        noted = {None, *(entry.path for entry in self._guard.call(self._listed, FOLDER))}
        for record in records:
            if _path(record) not in noted:
                self.note(record)

    def forget(self, record: Record) -> None:
        """Note a session no more."""
        path = _path(record)
        if path is not None:
            self._guard.call(self._place.remove, path)

    def of(self, tenant: str, root: str) -> list[str]:
        """Names of the branches of a session, those that were noted first before others.

        Some may never have been written; what is damaged is passed over.
        """
        folder = f"{FOLDER}/{tenant}/{session_key(tenant, root)}"
        found = sorted(self._guard.call(self._listed, folder), key=lambda each: each.modified)
        names = (self._read(entry.path) for entry in found)
        return [name for name in names if name]

    def sweep(self, there: Collection[tuple[str, str]], before: float) -> None:
        """Forget branches that are no more.

        Args:
            there: tenant and key of each session that is written.
            before: seconds since 1970; what was noted since then may be about to be written.
        """
        for entry in self._guard.call(self._listed, FOLDER):
            words = entry.path.split("/")
            if len(words) != 4 or not words[3].endswith(".json"):
                continue  # nothing of ours
            own = words[1], words[3].removesuffix(".json")
            if entry.modified <= before and own not in there:
                self._guard.call(self._place.remove, entry.path)

    def _read(self, path: str) -> str:
        try:
            told = parsed(self._guard.call(self._place.read, path))
            name = str(told["name"])
            return name if same(self._seal(path, name), str(told["seal"])) else ""
        except (FileNotFoundError, Damaged, Refused, KeyError, TypeError):
            return ""

    def _seal(self, path: str, name: str) -> str:
        return seal_of(self._secret, path, name)

    def _listed(self, folder: str) -> list[Entry]:
        return list(self._place.listing(folder))


def _path(record: Record) -> str | None:
    root = record.labels.get(ROOT, record.name)
    if root == record.name:
        return None
    return f"{FOLDER}/{record.tenant}/{session_key(record.tenant, root)}/{record.session}.json"
