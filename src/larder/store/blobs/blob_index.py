"""Blob index: reference counts, owners, sizes and deletion marks of blobs, in the manifest."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from larder.core.errors import BudgetError, StoreError, StoreSlow
from larder.store.blobs.blob_store import BlobRef, BlobStore
from larder.store.manifest import Manifest
from larder.store.sessions.records import Record

DELETION_LEASE_SECONDS = 120.0  # validity of a deletion mark until it is renewed
POLL_SECONDS = 0.01  # between two checks if a deletion has ended
REFERENCED_QUERY = (
    "SELECT 1 FROM spans WHERE digest = ? UNION SELECT 1 FROM chunks WHERE digest = ?"
)


class BlobIndex:
    """Blob tables of the manifest. Safe from threads and processes.

    Sessions (table `spans`) and prefix chunks (table `chunks`) refer to blobs. Only a blob without
    a reference is deleted: it is marked first, and from then on counts as missing.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def add(self, ref: BlobRef, tenant: str, now: float, room: int | None = None) -> int:
        """Register a blob that exists or is about to be written; return the bytes that this adds.

        Args:
            now: time by which its writer later recognizes its own registration.
            room: bytes that all blobs of all processes may come to; None for any number.

        Raises:
            BudgetError: others have taken the room meanwhile; nothing has changed.
        """
        with self._manifest.writing() as rows:
            before = _total_bytes(rows)
            rows(
                "INSERT INTO blobs VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET written = excluded.written",
                (ref.digest, ref.bytes, tenant, now),
            )
            after = _total_bytes(rows)
            if room is not None and after > room and after > before:
                raise BudgetError(
                    f"{ref.bytes} bytes more do not fit on the disk, where another process has "
                    "reserved the bytes: remove sessions, or raise the budget."
                )
        return after - before

    def release(self, refs: Iterable[BlobRef]) -> None:
        """Drop the references of sessions to these blobs, though their records still name them."""
        with self._manifest.writing() as rows:
            for ref in refs:
                rows("DELETE FROM spans WHERE digest = ?", (ref.digest,))

    def is_evicted(self, record: Record) -> bool:
        """True if a part of a session's state was released."""
        with self._manifest.reading() as rows:
            [(count,)] = rows(
                "SELECT count(*) FROM spans WHERE tenant = ? AND session = ? AND epoch = ?",
                (record.tenant, record.session, record.epoch),
            )
        return count < len({ref.digest for ref in record.refs})

    def is_referenced(self, digest: str) -> bool:
        """True if anything refers to a blob."""
        with self._manifest.reading() as rows:
            return bool(rows(REFERENCED_QUERY, (digest, digest)))

    def live_digests(self, since: float = math.inf) -> set[str]:
        """Digests of every blob that is referenced, or was registered since a time."""
        with self._manifest.reading() as rows:
            found = rows(
                "SELECT digest FROM spans UNION SELECT digest FROM chunks "
                "UNION SELECT digest FROM blobs WHERE written > ?",
                (since,),
            )
        return {digest for (digest,) in found}

    def bytes_by_tenant(self) -> dict[str, int]:
        """Bytes of blobs charged to each tenant, over all processes."""
        with self._manifest.reading() as rows:
            return dict(rows("SELECT tenant, bytes FROM totals"))

    def digests(self, since: float = -math.inf) -> set[str]:
        """Digests of blobs that processes of this machine have registered since a time."""
        with self._manifest.reading() as rows:
            found = rows("SELECT digest FROM blobs WHERE written > ?", (since,))
        return {digest for (digest,) in found}

    def written_at(self, digest: str) -> float | None:
        """Time a process of this machine last registered a blob; None if none did, or it is
        being deleted.
        """
        with self._manifest.reading() as rows:
            found = rows(
                "SELECT written FROM blobs WHERE digest = ? AND NOT EXISTS "
                "(SELECT 1 FROM leaving WHERE leaving.digest = blobs.digest)",
                (digest,),
            )
        return found[0][0] if found else None

    def touch(self, digest: str, now: float) -> bool:
        """Renew a blob that is about to be referenced; False if it is being deleted.

        A blob of another machine is not in this index, and is not added.

        Args:
            now: as in `add`.
        """
        with self._manifest.writing() as rows:
            if _is_being_deleted(rows, digest, now - DELETION_LEASE_SECONDS):
                return False
            rows("DELETE FROM leaving WHERE digest = ?", (digest,))  # of a process that has ended
            rows("UPDATE blobs SET written = ? WHERE digest = ?", (now, digest))
        return True

    def prune(self, existing: Collection[str], before: float) -> None:
        """Remove rows of blobs that are missing and were registered before a time."""
        with self._manifest.writing() as rows:
            for (digest,) in rows("SELECT digest FROM blobs WHERE written <= ?", (before,)):
                if digest not in existing:
                    rows("DELETE FROM blobs WHERE digest = ?", (digest,))
            rows(
                "DELETE FROM leaving WHERE since <= ?",
                (self._manifest.clock() - DELETION_LEASE_SECONDS,),
            )

    def mark_deleting(self, digest: str, own: float, before: float, now: float) -> bool:
        """Mark a blob as being deleted; its bytes count until `confirm_deletion`.

        Returns:
            False if the blob is referenced, or another process has registered it since.

        Args:
            own: time at which the caller registered it.
            before: time until which registrations by others count as over.
            now: time that identifies the mark.
        """
        query = "SELECT 1 FROM blobs WHERE digest = ? AND (written = ? OR written <= ?)"
        return self._mark(digest, now, now - DELETION_LEASE_SECONDS, query, (digest, own, before))

    def mark_orphan_deleting(self, digest: str, since: float, now: float) -> bool:
        """Mark a blob of any writer as being deleted, unless it was registered or another
        deletion of it was marked since a time.
        """
        query = "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM blobs WHERE digest = ? AND written > ?)"
        marked = max(since, now - DELETION_LEASE_SECONDS)
        return self._mark(digest, now, marked, query, (digest, since))

    def confirm_deletion(self, digest: str, marked: float) -> tuple[str, int] | None:
        """Confirm a deletion; return the tenant and bytes of the blob if this machine had
        registered it.

        Args:
            marked: time that identifies the mark.
        """
        with self._manifest.writing() as rows:
            if not _remove_mark(rows, digest, marked):
                return None  # another process has settled it after the time limit
            found = rows("DELETE FROM blobs WHERE digest = ? RETURNING tenant, bytes", (digest,))
        return found[0] if found else None

    def cancel_deletion(self, digest: str, marked: float) -> None:
        """End a deletion, whatever happened to the blob."""
        with self._manifest.writing() as rows:
            _remove_mark(rows, digest, marked)

    def renew_deletion(self, digest: str, marked: float, now: float) -> None:
        """Extend the mark of a deletion that is still in progress."""
        with self._manifest.writing() as rows:
            rows(
                "UPDATE leaving SET since = ? WHERE digest = ? AND since = ?", (now, digest, marked)
            )

    def count_written(self, day: int, count: int, limit: int | None) -> int | None:
        """Add bytes to a day's writes; return the earlier count if the limit would be exceeded."""
        with self._manifest.writing() as rows:
            found = rows("SELECT bytes FROM written WHERE day = ?", (day,))
            written = found[0][0] if found else 0
            if limit is not None and written + count > limit:
                return written
            rows("DELETE FROM written WHERE day < ?", (day,))
            rows("INSERT OR REPLACE INTO written VALUES (?, ?)", (day, written + count))
        return None

    def _mark(
        self, digest: str, now: float, marked: float, query: str, values: tuple[Any, ...]
    ) -> bool:
        with self._manifest.writing() as rows:
            is_needed = rows(REFERENCED_QUERY, (digest, digest))
            if is_needed or _is_being_deleted(rows, digest, marked) or not rows(query, values):
                return False
            rows("INSERT OR REPLACE INTO leaving VALUES (?, ?)", (digest, now))
        return True


def _total_bytes(rows: Callable[..., list[Any]]) -> int:
    [(total,)] = rows("SELECT coalesce(sum(bytes), 0) FROM totals")
    return total


def _is_being_deleted(rows: Callable[..., list[Any]], digest: str, since: float) -> bool:
    return bool(rows("SELECT 1 FROM leaving WHERE digest = ? AND since > ?", (digest, since)))


def _remove_mark(rows: Callable[..., list[Any]], digest: str, marked: float) -> bool:
    query = "DELETE FROM leaving WHERE digest = ? AND since = ? RETURNING 1"
    return bool(rows(query, (digest, marked)))


@dataclass
class _Deletion:
    """Deletion in progress.

    Args:
        marked: time that identifies its mark in the index.
        ended: set once the call has ended, possibly long after its time limit.
        is_abandoned: no caller waits for it any more.
    """

    digest: str
    marked: float
    ended: threading.Event = field(default_factory=threading.Event)
    is_abandoned: bool = False


@dataclass(frozen=True)
class DeletionResult:
    """Result of deleting a blob.

    Args:
        freed: bytes of the file.
        is_quarantined: no file was found, but a damaged copy is in quarantine.
        registered: tenant and bytes that the index had; None if no process of this machine has
            registered the blob.
    """

    freed: int
    is_quarantined: bool
    registered: tuple[str, int] | None


class PendingDeletions:
    """Deletions that the index has marked. Safe from threads.

    Args:
        seconds: how long to wait for a deletion by another process.
    """

    def __init__(
        self, blobs: BlobStore, index: BlobIndex, clock: Callable[[], float], seconds: float
    ) -> None:
        self._blobs, self._index = blobs, index
        self._clock, self._seconds = clock, seconds
        self._lock = threading.Lock()
        self._pending: list[_Deletion] = []

    def delete(self, digest: str, marked: float) -> DeletionResult:
        """Delete a blob and confirm it in the index when the call ends.

        Args:
            marked: time that identifies the mark.

        Raises:
            StoreError: the disk fails, or takes too long; then the blob may go later.
        """
        deletion = _Deletion(digest, marked)
        with self._lock:
            self._pending.append(deletion)
        try:
            freed, is_quarantined = self._blobs.delete(digest, deletion.ended.set)
            with self._lock:
                registered = self._index.confirm_deletion(digest, deletion.marked)
                self._pending.remove(deletion)
        except BaseException:
            deletion.is_abandoned = True
            with suppress(StoreError):  # confirmed later
                self.settle()
            raise
        return DeletionResult(freed, is_quarantined, registered)

    def settle(self) -> None:
        """Confirm deletions that have ended in the meantime and renew those in progress."""
        with self._lock:
            for deletion in [*self._pending]:
                now = self._clock()
                if deletion.is_abandoned and deletion.ended.is_set():
                    self._index.cancel_deletion(deletion.digest, deletion.marked)
                    self._pending.remove(deletion)
                elif deletion.marked <= now - DELETION_LEASE_SECONDS / 2:
                    self._index.renew_deletion(deletion.digest, deletion.marked, now)
                    deletion.marked = now

    def await_end(self, digest: str, is_over: Callable[[str], bool]) -> None:
        """Wait until no process is deleting a blob.

        Raises:
            StoreSlow: a deletion is still in progress.
        """
        until = time.monotonic() + self._seconds
        while not is_over(digest):
            if time.monotonic() > until:
                raise StoreSlow(
                    f"Blob {digest[:12]} was being deleted for {self._seconds:g} s, and cannot be "
                    "written before the deletion ends: try again, and check the disk."
                )
            time.sleep(POLL_SECONDS)
