"""Epochs of sessions: records beside the blobs, indexed by the manifest.

Creating the record file of the next epoch commits a state, which only one writer of all machines
can do. The manifest follows. Records that it lacks, of other machines or after a crash, are indexed
when the session is read.

A new session under the name of a removed one begins after its last epoch; once its tombstone is
deleted, after the last epoch of all removed sessions of the tenant. A writer that still knows the
removed session therefore finds another epoch than it expects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from larder.core.errors import Damaged, InputError, Refused, StoreError, Superseded
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
    SessionKey,
    decode_record,
    encode_record,
    upgraded_record,
)

FORGOTTEN_FOLDER = "forgotten"  # per tenant: the last epoch of its removed sessions
KEPT_EPOCHS = 4  # states of a session that are retained, for rolling back
BRANCHES_FOLDER = "families"


class SessionEpochs:
    """Epochs of sessions. Safe from threads and processes.

    Args:
        damaged: called with a message for every damaged record.
    """

    def __init__(
        self,
        file_system: FileSystem,
        executor: DeadlineExecutor,
        manifest: Manifest,
        secret: bytes,
        damaged: Callable[[str], None],
    ) -> None:
        self._files, self._executor, self.manifest = file_system, executor, manifest
        self._secret, self._damaged = secret, damaged

    def head(self, key: SessionKey) -> Record | None:
        """Newest intact state; None if there is none, or the session was removed.

        Raises:
            Damaged: there are states, but none is whole.
        """
        record = self.newest(key)
        return None if record is None or record.removed else record

    def newest(self, key: SessionKey) -> Record | None:
        """Newest intact state, tombstones of removed sessions included."""
        known = self._known(key, None)
        written = self.written(key)
        if known is not None and not written and known.epoch < self._forgotten(key.tenant):
            self.manifest.forget_session(key)  # another machine has removed it
            return None
        if known is not None and known.epoch >= max(written, default=0):
            return known
        there = sorted({*written, *self.manifest.epochs(key)}, reverse=True)
        for epoch in there:
            record = self.epoch(key, epoch)
            if record is not None:
                self.manifest.adopt(record)
                self.manifest.roll_back_head(key, epoch)
                return record
            if epoch in written and epoch not in self.written(key):
                return self.newest(key)  # pruned meanwhile, after a newer state
            self._executor.call(self._files.set_aside, key.record_path(epoch))
        if there:
            raise Damaged(
                "Every record of the session is damaged: remove it, and begin it again from its "
                "text."
            )
        return None

    def epoch(self, key: SessionKey, epoch: int) -> Record | None:
        """State of one epoch, from the manifest or its record; None if neither is intact."""
        return self._known(key, epoch) or self._beside(key, epoch)

    def written(self, key: SessionKey) -> list[int]:
        """Epochs that have a record beside the blobs."""
        return self._executor.call(self._listed, key.folder)

    def commit(self, record: Record, expected: int, is_new: bool = False) -> None:
        """Commit a record, whose epoch is the next one, as the head.

        Args:
            is_new: it begins a session after the epoch that `before` returned; sessions that were
                forgotten since then do not matter.

        Raises:
            InputError: it begins a session, and the name is invalid.
            Superseded: another writer has committed that epoch.
            StoreFull: nothing can be written.
        """
        if is_new:
            check_name(record.name)
        newest = self.newest(record.key)
        epoch = self._forgotten(record.tenant) if newest is None else newest.epoch
        if epoch != expected and not (is_new and newest is None and expected < epoch):
            raise superseded_error(record.name, expected, epoch)
        self._create(record)
        try:
            self.manifest.commit(record, expected)
        except Superseded:  # another thread has indexed or continued the session meanwhile
            self.manifest.adopt(record)

    def before(self, tenant: str, newest: Record | None, expected: int | None) -> int:
        """Epoch that a session's next state follows.

        Args:
            newest: state of the session.
            expected: epoch that the writer knows: 0 for a new session, None for the newest.
        """
        if expected is None or (not expected and (newest is None or newest.removed)):
            return self._forgotten(tenant) if newest is None else newest.epoch
        return expected

    def free_epoch(self, key: SessionKey, name: str) -> int:
        """Epoch that a new session follows.

        Raises:
            InputError: there is a session of that name.
        """
        newest = self.newest(key)
        if newest is not None and not newest.removed:
            raise InputError(f"There is a session {name!r} already: take another name.")
        return self.before(key.tenant, newest, None)

    def prune(self, key: SessionKey, keep: int) -> list[Record]:
        """Drop all but the newest states; return the dropped records that could be read."""
        known = self.manifest.epochs(key)
        there = sorted({*known, *self.written(key)})
        old = there[:-keep]
        if known and old:
            self._adopt(key, {*there[-keep:]} - {*known})
        records = [self.epoch(key, epoch) for epoch in old]
        self._drop(key, old)
        return [record for record in records if record is not None]

    def relabel(self, record: Record) -> None:
        """Commit a head that differs from the previous one in its labels alone.

        Raises:
            Superseded, StoreFull: as `commit`.
        """
        self.commit(record, record.previous)
        with suppress(StoreError):  # otherwise the former state is pruned later
            self._drop(record.key, [record.previous])

    def remove_damaged(self, key: SessionKey, name: str, created: float) -> None:
        """Remove a session of which no state can be read.

        Raises:
            Superseded: another writer has continued it after all.
        """
        lost = sorted({*self.manifest.epochs(key), *self.written(key)})
        last, nothing = max(lost, default=0), BlobRef(digest_of(b""), 0)
        tombstone = Record(
            key.tenant,
            key.session,
            name,
            epoch=last + 1,
            tokens=nothing,
            num_tokens=0,
            previous=last,
            made=created,
            removed=True,
        )
        self._create(tombstone)
        self.manifest.roll_back_head(key, 0)
        self.manifest.adopt(tombstone)
        self._drop(key, lost)

    def forget(self, record: Record) -> None:
        """Delete the tombstone of a removed session; its name is then unused."""
        self._note_forgotten(record.tenant, record.epoch)
        self.manifest.forget_session(record.key)
        for epoch in self.written(record.key):  # earlier ones that appeared late, too
            if epoch <= record.epoch:
                self._executor.call(self._files.remove, record.key.record_path(epoch))

    def indexed_heads(self, tenant: str) -> list[Record]:
        """Newest state of each session of a tenant, most recently used first."""
        found = list[Record]()
        for key, record in self.manifest.heads_of(tenant).items():
            if record is None:
                with suppress(StoreError):  # neither is whole
                    record = self.newest(key)
            if record is not None and not record.removed:
                found.append(record)
        return found

    def sync_manifest(self) -> None:
        """Index records beside the blobs that the manifest lacks.

        This completes an index that was lost, damaged or interrupted while it was built, and adds
        what other machines have written meanwhile.
        """
        known, there = self.manifest.heads(), set[SessionKey]()
        for path in self._executor.call(self._paths):
            if (parsed := _parse_record_path(path)) is None:
                continue
            key, epoch = parsed
            there.add(key)
            if epoch > known.get(key, 0):
                self._adopt(key, [epoch])
        for key in known.keys() - there:
            with suppress(StoreError):  # another machine may have removed it
                self.newest(key)

    def all_records(self) -> tuple[list[Record], dict[str, str]]:
        """Every intact record beside the blobs, and why those of other versions are refused, by
        path."""
        records, refused = list[Record](), dict[str, str]()
        for path in self._executor.call(self._paths):
            parsed = _parse_record_path(path)
            try:
                record = None if parsed is None else self._beside(parsed[0], parsed[1])
            except Refused as error:
                self._damaged(str(error))
                refused[path] = str(error)
                continue
            if record is not None:
                records.append(record)
        return records, refused

    def upgrade(self) -> tuple[int, dict[str, str]]:
        """Replace records of earlier versions by those of the present one, each at once.

        Returns:
            their number, and why others are refused, by path.
        """
        count, refused = 0, dict[str, str]()
        for path in self._executor.call(self._paths):
            parsed = _parse_record_path(path)
            try:
                data = self._executor.call(self._files.read, path)
                record = upgraded_record(data, self._secret)
            except (FileNotFoundError, Damaged):  # set aside when the session is read
                continue
            except Refused as error:
                refused[path] = str(error)
                continue
            if record is None or (record.key, record.epoch) != parsed:
                continue
            self._executor.call(self._files.replace, path, encode_record(record, self._secret))
            self.manifest.adopt(record)
            count += 1
        return count, refused

    def _create(self, record: Record) -> None:
        """Create the record of an epoch.

        Raises:
            Superseded: it exists.
        """
        try:
            self._executor.call(
                self._files.create, record.path, encode_record(record, self._secret)
            )
        except FileExistsError as error:
            with suppress(Damaged):  # its blobs may be the ones evicted now
                self.newest(record.key)
            raise superseded_error(record.name, record.previous, record.epoch) from error

    def _forgotten(self, tenant: str) -> int:
        """Highest epoch of a tenant's forgotten sessions; 0 if there are none."""
        return max(self._executor.call(self._numbers, f"{FORGOTTEN_FOLDER}/{tenant}"), default=0)

    def _note_forgotten(self, tenant: str, epoch: int) -> None:
        folder = f"{FORGOTTEN_FOLDER}/{tenant}"
        noted = self._executor.call(self._numbers, folder)
        if epoch <= max(noted, default=0):
            return
        with suppress(FileExistsError):
            self._executor.call(self._files.create, f"{folder}/{epoch}.json", b"{}")
        for each in noted:
            self._executor.call(self._files.remove, f"{folder}/{each}.json")

    def _numbers(self, folder: str) -> list[int]:
        names = (entry.path.rpartition("/")[2] for entry in self._files.list_files(folder))
        words = (name.removesuffix(".json") for name in names)
        return [int(word) for word in words if word.isascii() and word.isdecimal()]

    def _drop(self, key: SessionKey, epochs: list[int]) -> None:
        self.manifest.forget(key, epochs)
        for epoch in epochs:
            self._executor.call(self._files.remove, key.record_path(epoch))

    def _adopt(self, key: SessionKey, epochs: Iterable[int]) -> None:
        """Index states of another machine, so that their blobs stay referenced."""
        for epoch in epochs:
            with suppress(Refused):
                record = self._beside(key, epoch)
                if record is not None:
                    self.manifest.adopt(record)

    def _known(self, key: SessionKey, epoch: int | None) -> Record | None:
        """State in the manifest; None if it is damaged, or not yet carried over as its record."""
        try:
            if epoch is None:
                return self.manifest.head(key)
            return self.manifest.epoch(key, epoch)
        except Damaged as error:
            self._damaged(str(error))
            return None
        except Refused:
            if not self.written(key):  # only the index has it, for the version that wrote it
                raise
            return None

    def _beside(self, key: SessionKey, epoch: int) -> Record | None:
        try:
            data = self._executor.call(self._files.read, key.record_path(epoch))
            record = decode_record(data, self._secret)
        except FileNotFoundError:
            return None
        except Damaged as error:
            self._damaged(str(error))
            return None
        if (record.key, record.epoch) != (key, epoch):
            self._damaged("A record is at the path of another.")
            return None
        return record

    def _listed(self, folder: str) -> list[int]:
        parsed = [_parse_record_path(entry.path) for entry in self._files.list_files(folder)]
        return sorted(each[1] for each in parsed if each)

    def _paths(self) -> list[str]:
        return [entry.path for entry in self._files.list_files(SESSIONS_FOLDER)]


def _parse_record_path(path: str) -> tuple[SessionKey, int] | None:
    """Session and epoch of a record's path; None for any other path."""
    words = path.split("/")
    number = words[-1].removesuffix(".json")
    if len(words) != 4 or not number.isdecimal() or not number.isascii():
        return None
    key, epoch = SessionKey(words[1], words[2]), int(number)
    try:
        return (key, epoch) if path == key.record_path(epoch) else None
    except Damaged:
        return None


class BranchNotes:
    """Notes that name the branches of each session. Safe from threads and processes.

    Args:
        file_system: of the notes.
    """

    def __init__(self, file_system: FileSystem, executor: DeadlineExecutor, secret: bytes) -> None:
        self._files, self._executor, self._secret = file_system, executor, secret

    def note(self, record: Record) -> None:
        """Write the note of a session if it is a branch."""
        path = _branch_path(record)
        if path is None:
            return
        data = sealed_json(self._secret, "name", record.name, path)
        with suppress(FileExistsError):
            self._executor.call(self._files.create, path, data)

    def note_all(self, records: Iterable[Record]) -> None:
        """Write the notes of many branches, most of which exist."""
        noted = {
            None,
            *(entry.path for entry in self._executor.call(self._listed, BRANCHES_FOLDER)),
        }
        for record in records:
            if _branch_path(record) not in noted:
                self.note(record)

    def forget(self, record: Record) -> None:
        """Delete the note of a session."""
        path = _branch_path(record)
        if path is not None:
            self._executor.call(self._files.remove, path)

    def of(self, tenant: str, root: str) -> list[str]:
        """Names of the branches of a session, oldest note first.

        Some sessions may never have been written; damaged notes are skipped.
        """
        folder = f"{BRANCHES_FOLDER}/{tenant}/{SessionKey.named(tenant, root).session}"
        found = sorted(self._executor.call(self._listed, folder), key=lambda each: each.modified)
        names = (self._read(entry.path) for entry in found)
        return [name for name in names if name]

    def sweep(self, existing: Collection[SessionKey], before: float) -> None:
        """Delete notes of branches that do not exist and were noted before a time.

        Args:
            existing: all sessions with a record.
            before: seconds since 1970; sessions of later notes may be about to be written.
        """
        for entry in self._executor.call(self._listed, BRANCHES_FOLDER):
            words = entry.path.split("/")
            if len(words) != 4 or not words[3].endswith(".json"):
                continue  # no note
            key = SessionKey(words[1], words[3].removesuffix(".json"))
            if entry.modified <= before and key not in existing:
                self._executor.call(self._files.remove, entry.path)

    def _read(self, path: str) -> str:
        try:
            data = self._executor.call(self._files.read, path)
            return open_sealed_json(self._secret, "name", data, path)
        except (FileNotFoundError, Damaged):
            return ""

    def _listed(self, folder: str) -> list[FileInfo]:
        return list(self._files.list_files(folder))


def _branch_path(record: Record) -> str | None:
    root = record.labels.get(ROOT_LABEL, record.name)
    if root == record.name:
        return None
    parent = SessionKey.named(record.tenant, root)
    return f"{BRANCHES_FOLDER}/{parent.tenant}/{parent.session}/{record.session}.json"
