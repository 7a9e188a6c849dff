"""Which sessions are branches of which, for any machine that has one of them.

    families/<tenant>/<root>/<branch>.json

A session whose label `ROOT_LABEL` names another one is noted here before its first state is
written, and forgotten when it is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

from larder.core.errors import Damaged, Refused
from larder.store.blobs.container import canonical_json, parse_json
from larder.store.digests import digests_equal, mac_of
from larder.store.fs.base import FileInfo, FileSystem
from larder.store.fs.deadline import DeadlineExecutor
from larder.store.sessions.records import ROOT_LABEL, Record, session_key

BRANCHES_FOLDER = "families"


class BranchNotes:
    """Safe from threads and processes.

    Args:
        place: where notes lie.
    """

    def __init__(self, place: FileSystem, guard: DeadlineExecutor, secret: bytes) -> None:
        self._place, self._guard, self._secret = place, guard, secret

    def note(self, record: Record) -> None:
        """Note a session, if it is a branch."""
        path = _branch_path(record)
        if path is None:
            return
        data = canonical_json({"name": record.name, "seal": self._seal(path, record.name)}).encode()
        with suppress(FileExistsError):
            self._guard.call(self._place.create, path, data)

    def note_all(self, records: Iterable[Record]) -> None:
        """The same for many, most of which are noted."""
        noted = {None, *(entry.path for entry in self._guard.call(self._listed, BRANCHES_FOLDER))}
        for record in records:
            if _branch_path(record) not in noted:
                self.note(record)

    def forget(self, record: Record) -> None:
        """Note a session no more."""
        path = _branch_path(record)
        if path is not None:
            self._guard.call(self._place.remove, path)

    def of(self, tenant: str, root: str) -> list[str]:
        """Names of the branches of a session, those that were noted first before others.

        Some may never have been written; what is damaged is passed over.
        """
        folder = f"{BRANCHES_FOLDER}/{tenant}/{session_key(tenant, root)}"
        found = sorted(self._guard.call(self._listed, folder), key=lambda each: each.modified)
        names = (self._read(entry.path) for entry in found)
        return [name for name in names if name]

    def sweep(self, there: Collection[tuple[str, str]], before: float) -> None:
        """Forget branches that are no more.

        Args:
            there: tenant and key of each session that is written.
            before: seconds since 1970; what was noted since then may be about to be written.
        """
        for entry in self._guard.call(self._listed, BRANCHES_FOLDER):
            words = entry.path.split("/")
            if len(words) != 4 or not words[3].endswith(".json"):
                continue  # nothing of ours
            own = words[1], words[3].removesuffix(".json")
            if entry.modified <= before and own not in there:
                self._guard.call(self._place.remove, entry.path)

    def _read(self, path: str) -> str:
        try:
            told = parse_json(self._guard.call(self._place.read, path))
            name = str(told["name"])
            return name if digests_equal(self._seal(path, name), str(told["seal"])) else ""
        except (FileNotFoundError, Damaged, Refused, KeyError, TypeError):
            return ""

    def _seal(self, path: str, name: str) -> str:
        return mac_of(self._secret, path, name)

    def _listed(self, folder: str) -> list[FileInfo]:
        return list(self._place.listing(folder))


def _branch_path(record: Record) -> str | None:
    root = record.labels.get(ROOT_LABEL, record.name)
    if root == record.name:
        return None
    key = session_key(record.tenant, root)
    return f"{BRANCHES_FOLDER}/{record.tenant}/{key}/{record.session}.json"
