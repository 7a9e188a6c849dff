"""Committed epochs of sessions: records beside the blobs, indexed by the manifest.

A state is committed when its record is created under the next epoch's name, which only one can do,
also of several machines. The manifest follows. What it lacks, because a process ended in between or
because another machine wrote it, is read from the records when the session is asked for.

A session that takes the name of one that was removed begins behind that one's last epoch, and
behind all that its tenant's removed sessions have had once what says of them is dropped: a
writer that still knows one of them finds that it has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from larder.core.errors import Damaged, Refused, StoreError, Superseded
from larder.core.session_name import check_session_name as check_name
from larder.store.blobs.blob_store import BlobRef
from larder.store.digests import digest_of, open_sealed_json, sealed_json
from larder.store.fs.base import FileInfo, FileSystem
from larder.store.fs.deadline import DeadlineExecutor
from larder.store.manifest import Manifest, superseded_error
from larder.store.sessions.records import (
    ROOT_LABEL,
    SESSIONS_FOLDER,
    Record,
    decode_record,
    encode_record,
    record_path,
    records_folder,
    session_key,
)

FORGOTTEN_FOLDER = "forgotten"  # a folder of each tenant's: the last epoch of what was removed
KEPT_EPOCHS = 4  # of a session, for rolling back


class SessionEpochs:
    """Epochs of sessions. Safe from threads and processes.

    Args:
        damaged: called with a message for every damaged record.
    """

    def __init__(
        self,
        place: FileSystem,
        guard: DeadlineExecutor,
        manifest: Manifest,
        secret: bytes,
        damaged: Callable[[str], None],
    ) -> None:
        self._place, self._guard, self.manifest = place, guard, manifest
        self._secret, self._damaged = secret, damaged

    def head(self, tenant: str, session: str) -> Record | None:
        """Newest intact state; None if there is none, or the session was removed.

        Raises:
            Damaged: there are states, but none is whole.
        """
        record = self.newest(tenant, session)
        return None if record is None or record.removed else record

    def newest(self, tenant: str, session: str) -> Record | None:
        """Newest intact state, tombstones of removed sessions included."""
        known = self._known(tenant, session, None)
        written = self.written(tenant, session)
        if known is not None and not written and known.epoch < self._forgotten(tenant):
            self.manifest.forget_session(tenant, session)  # another machine has removed it
            return None
        if known is not None and known.epoch >= max(written, default=0):
            return known
        there = sorted({*written, *self.manifest.epochs(tenant, session)}, reverse=True)
        for epoch in there:
            record = self.epoch(tenant, session, epoch)
            if record is not None:
                self.manifest.adopt(record)
                self.manifest.roll_back_head(tenant, session, epoch)
                return record
            if epoch in written and epoch not in self.written(tenant, session):
                return self.newest(tenant, session)  # it was dropped meanwhile, for a newer one
            self._guard.call(self._place.set_aside, record_path(tenant, session, epoch))
        if there:
            raise Damaged(
                "Every record of the session is damaged: remove it, and begin it again from its "
                "text."
            )
        return None

    def epoch(self, tenant: str, session: str, epoch: int) -> Record | None:
        """State of one epoch, from the manifest or its record; None if neither is intact."""
        return self._known(tenant, session, epoch) or self._beside(tenant, session, epoch)

    def written(self, tenant: str, session: str) -> list[int]:
        """Epochs that have a record beside the blobs."""
        return self._guard.call(self._listed, records_folder(tenant, session))

    def commit(self, record: Record, expected: int, is_new: bool = False) -> None:
        """Commit a record, whose epoch is the next one, as the head.

        Args:
            is_new: it begins a session behind the epoch that `before` told: sessions that were
                forgotten since then are no matter.

        Raises:
            InputError: it begins a session, and none may be called so.
            Superseded: somebody else has written that epoch.
            StoreFull: nothing can be written.
        """
        if is_new:
            check_name(record.name)
        newest = self.newest(record.tenant, record.session)
        epoch = self._forgotten(record.tenant) if newest is None else newest.epoch
        if epoch != expected and not (is_new and newest is None and expected < epoch):
            raise superseded_error(record.name, expected, epoch)
        self._create(record)
        try:
            self.manifest.commit(record, expected)
        except Superseded:  # somebody has looked at the session meanwhile, or gone on with it
            self.manifest.adopt(record)

    def before(self, tenant: str, newest: Record | None, expected: int | None) -> int:
        """Epoch that a session's next state follows.

        Args:
            newest: state of the session.
            expected: what its writer knows: 0 for a new session, None for whatever is there.
        """
        if expected is None or (not expected and (newest is None or newest.removed)):
            return self._forgotten(tenant) if newest is None else newest.epoch
        return expected

    def prune(self, tenant: str, session: str, keep: int) -> list[Record]:
        """Drop all but the newest states; return the dropped records that could be read."""
        known = self.manifest.epochs(tenant, session)
        there = sorted({*known, *self.written(tenant, session)})
        old = there[:-keep]
        if known and old:
            self._adopt(tenant, session, {*there[-keep:]} - {*known})
        records = [self.epoch(tenant, session, epoch) for epoch in old]
        self._drop(tenant, session, old)
        return [record for record in records if record is not None]

    def relabel(self, record: Record) -> None:
        """Commit a head that differs from the previous one in its labels alone.

        Raises:
            Superseded, StoreFull: as `commit`.
        """
        self.commit(record, record.previous)
        with suppress(StoreError):  # what is left is one more state, until they are pruned
            self._drop(record.tenant, record.session, [record.previous])

    def remove_damaged(self, tenant: str, session: str, name: str, made: float) -> None:
        """Remove a session of which no state can be read.

        Raises:
            Superseded: somebody else goes on with it after all.
        """
        lost = sorted({*self.manifest.epochs(tenant, session), *self.written(tenant, session)})
        last, nothing = max(lost, default=0), BlobRef(digest_of(b""), 0)
        own = tenant, session, name, last + 1, nothing, 0, last
        gone = Record(*own, made=made, removed=True)
        self._create(gone)
        self.manifest.roll_back_head(tenant, session, 0)
        self.manifest.adopt(gone)
        self._drop(tenant, session, lost)

    def forget(self, record: Record) -> None:
        """Delete the tombstone of a removed session; its name is then unused."""
        self._note_forgotten(record.tenant, record.epoch)
        own = record.tenant, record.session
        self.manifest.forget_session(*own)
        for epoch in self.written(*own):  # earlier ones that came about late, too
            if epoch <= record.epoch:
                self._guard.call(self._place.remove, record_path(*own, epoch))

    def of(self, tenant: str) -> list[Record]:
        """Newest state of each session of a tenant, most recently used first."""
        found = list[Record]()
        for session, record in self.manifest.heads_of(tenant).items():
            if record is None:
                with suppress(StoreError):  # neither is whole
                    record = self.newest(tenant, session)
            if record is not None and not record.removed:
                found.append(record)
        return found

    def sync_manifest(self) -> None:
        """Index records beside the blobs that the manifest lacks.

        Only that is read. The rest of an index that was lost, damaged or interrupted while it was
        built comes about so, and what other machines have written meanwhile.
        """
        known, there = self.manifest.heads(), set[tuple[str, str]]()
        for tenant, session, epoch in filter(
            None, map(_parse_record_path, self._guard.call(self._paths))
        ):
            there.add((tenant, session))
            if epoch > known.get((tenant, session), 0):
                self._adopt(tenant, session, [epoch])
        for own in known.keys() - there:
            with suppress(StoreError):  # another machine may have removed it
                self.newest(*own)

    def all_records(self) -> list[Record]:
        """Every intact, readable record beside the blobs."""
        found = []
        for parts in map(_parse_record_path, self._guard.call(self._paths)):
            try:
                found.append(None if parts is None else self._beside(*parts))
            except Refused as error:
                self._damaged(str(error))
        return [record for record in found if record is not None]

    def _create(self, record: Record) -> None:
        """Create the record of an epoch. Raises: Superseded: it exists."""
        try:
            self._guard.call(self._place.create, record.path, encode_record(record, self._secret))
        except FileExistsError as error:
            with suppress(Damaged):  # its blobs may be the ones evicted now
                self.newest(record.tenant, record.session)
            raise superseded_error(record.name, record.previous, record.epoch) from error

    def _forgotten(self, tenant: str) -> int:
        """Highest epoch of a tenant's forgotten sessions; 0 if there are none."""
        return max(self._guard.call(self._numbers, f"{FORGOTTEN_FOLDER}/{tenant}"), default=0)

    def _note_forgotten(self, tenant: str, epoch: int) -> None:
        folder = f"{FORGOTTEN_FOLDER}/{tenant}"
        noted = self._guard.call(self._numbers, folder)
        if epoch <= max(noted, default=0):
            return
        with suppress(FileExistsError):
            self._guard.call(self._place.create, f"{folder}/{epoch}.json", b"{}")
        for each in noted:
            self._guard.call(self._place.remove, f"{folder}/{each}.json")

    def _numbers(self, folder: str) -> list[int]:
        names = (entry.path.rpartition("/")[2] for entry in self._place.list_files(folder))
        words = (name.removesuffix(".json") for name in names)
        return [int(word) for word in words if word.isascii() and word.isdecimal()]

    def _drop(self, tenant: str, session: str, epochs: list[int]) -> None:
        self.manifest.forget(tenant, session, epochs)
        for epoch in epochs:
            self._guard.call(self._place.remove, record_path(tenant, session, epoch))

    def _adopt(self, tenant: str, session: str, epochs: Iterable[int]) -> None:
        """Index states of another machine, so that their blobs stay referenced."""
        for epoch in epochs:
            with suppress(Refused):
                record = self._beside(tenant, session, epoch)
                if record is not None:
                    self.manifest.adopt(record)

    def _known(self, tenant: str, session: str, epoch: int | None) -> Record | None:
        """State in the manifest; None if it is damaged."""
        try:
            if epoch is None:
                return self.manifest.head(tenant, session)
            return self.manifest.epoch(tenant, session, epoch)
        except Damaged as error:
            self._damaged(str(error))
            return None

    def _beside(self, tenant: str, session: str, epoch: int) -> Record | None:
        try:
            data = self._guard.call(self._place.read, record_path(tenant, session, epoch))
            record = decode_record(data, self._secret)
        except FileNotFoundError:
            return None
        except Damaged as error:
            self._damaged(str(error))
            return None
        if (record.tenant, record.session, record.epoch) != (tenant, session, epoch):
            self._damaged("A record lies in the place of another.")
            return None
        return record

    def _listed(self, folder: str) -> list[int]:
        parts = [_parse_record_path(entry.path) for entry in self._place.list_files(folder)]
        return sorted(each[2] for each in parts if each)

    def _paths(self) -> list[str]:
        return [entry.path for entry in self._place.list_files(SESSIONS_FOLDER)]


def _parse_record_path(path: str) -> tuple[str, str, int] | None:
    """Tenant, session and epoch from a record's path; None for any other path."""
    words = path.split("/")
    number = words[-1].removesuffix(".json")
    if len(words) != 4 or not number.isdecimal() or not number.isascii():
        return None
    try:
        is_record = path == record_path(words[1], words[2], int(number))
    except Damaged:
        return None
    return (words[1], words[2], int(number)) if is_record else None


BRANCHES_FOLDER = "families"


class BranchNotes:
    """Notes that name the branches of each session. Safe from threads and processes.

    Args:
        place: where notes lie.
    """

    def __init__(self, place: FileSystem, guard: DeadlineExecutor, secret: bytes) -> None:
        self._place, self._guard, self._secret = place, guard, secret

    def note(self, record: Record) -> None:
        """Write the note of a session if it is a branch."""
        path = _branch_path(record)
        if path is None:
            return
        data = sealed_json(self._secret, "name", record.name, path)
        with suppress(FileExistsError):
            self._guard.call(self._place.create, path, data)

    def note_all(self, records: Iterable[Record]) -> None:
        """Write the notes of many branches, most of which exist."""
        noted = {None, *(entry.path for entry in self._guard.call(self._listed, BRANCHES_FOLDER))}
        for record in records:
            if _branch_path(record) not in noted:
                self.note(record)

    def forget(self, record: Record) -> None:
        """Delete the note of a session."""
        path = _branch_path(record)
        if path is not None:
            self._guard.call(self._place.remove, path)

    def of(self, tenant: str, root: str) -> list[str]:
        """Names of the branches of a session, oldest note first.

        Some sessions may never have been written; damaged notes are skipped.
        """
        folder = f"{BRANCHES_FOLDER}/{tenant}/{session_key(tenant, root)}"
        found = sorted(self._guard.call(self._listed, folder), key=lambda each: each.modified)
        names = (self._read(entry.path) for entry in found)
        return [name for name in names if name]

    def sweep(self, there: Collection[tuple[str, str]], before: float) -> None:
        """Delete notes of branches that no longer exist.

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
            data = self._guard.call(self._place.read, path)
            return open_sealed_json(self._secret, "name", data, path)
        except (FileNotFoundError, Damaged):
            return ""

    def _listed(self, folder: str) -> list[FileInfo]:
        return list(self._place.list_files(folder))


def _branch_path(record: Record) -> str | None:
    root = record.labels.get(ROOT_LABEL, record.name)
    if root == record.name:
        return None
    key = session_key(record.tenant, root)
    return f"{BRANCHES_FOLDER}/{record.tenant}/{key}/{record.session}.json"
