"""Reference-counted index of blobs in the manifest: owner, size, references and deletions."""

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
REFERENCED_QUERY = (
    "SELECT 1 FROM spans WHERE digest = ? UNION SELECT 1 FROM chunks WHERE digest = ?"
)


class BlobIndex:
    """Blob tables of the manifest. Safe from threads and processes."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def kept(self, ref: BlobRef, tenant: str, now: float, room: int | None = None) -> int:
        """Register a blob that exists or is about to be written; return the bytes new to the
        tenant.

        Args:
            now: as in `touched`.
            room: bytes that all blobs of all processes may come to; None for any number.

        Raises:
            BudgetError: others have taken the room meanwhile; nothing has changed.
        """
        with self._manifest.writing() as rows:
            before = self._total(rows)
            rows(
                "INSERT INTO blobs VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET written = excluded.written",
                (ref.digest, ref.bytes, tenant, now),
            )
            after = self._total(rows)
            if room is not None and after > room and after > before:
                raise BudgetError(
                    f"{ref.bytes} bytes more do not fit on the disk, where another process has "
                    "reserved the bytes: remove sessions, or raise the budget."
                )
        return after - before

    def bytes_by_tenant(self) -> dict[str, int]:
        """Bytes of blobs charged to each tenant, over all processes."""
        with self._manifest.reading() as rows:
            return dict(rows("SELECT tenant, bytes FROM totals"))

    def prune(self, there: Collection[str], before: float) -> None:
        """Remove index rows of blobs that are missing and were registered before a time."""
        with self._manifest.writing() as rows:
            known = rows("SELECT digest FROM blobs WHERE written <= ?", (before,))
            for (digest,) in known:
                if digest not in there:
                    rows("DELETE FROM blobs WHERE digest = ?", (digest,))
            rows(
                "DELETE FROM leaving WHERE since <= ?",
                (self._manifest.clock() - DELETION_LEASE_SECONDS,),
            )

    def live_digests(self, since: float = math.inf) -> set[str]:
        """Digests of every blob that is referenced, or was registered since a time."""
        with self._manifest.reading() as rows:
            found = rows(
                "SELECT digest FROM spans UNION SELECT digest FROM chunks "
                "UNION SELECT digest FROM blobs WHERE written > ?",
                (since,),
            )
        return {digest for (digest,) in found}

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

    def touch(self, digest: str, now: float) -> bool:
        """Renew a blob that is about to be referenced; False if it is being deleted.

        One that another machine has written has no place in this index, and is given none.

        Args:
            now: by which who says it knows later whether somebody else has said so since.
        """
        with self._manifest.writing() as rows:
            if _is_being_deleted(rows, digest, now - DELETION_LEASE_SECONDS):
                return False
            rows("DELETE FROM leaving WHERE digest = ?", (digest,))  # of a process that has ended
            rows("UPDATE blobs SET written = ? WHERE digest = ?", (now, digest))
        return True

    def mark_deleting(self, digest: str, own: float, before: float, now: float) -> bool:
        """Mark a blob as being deleted: from then on it counts as missing.

        False where that must not be: something needs it, or somebody else has put it since. Its
        bytes count until `gone` is called.

        Args:
            own: when who asks has put it.
            before: what others have put until then is in the making no more.
            now: what the note is known by.
        """
        asked = "SELECT 1 FROM blobs WHERE digest = ? AND (written = ? OR written <= ?)"
        return self._mark(digest, now, now - DELETION_LEASE_SECONDS, asked, (digest, own, before))

    def mark_orphan_deleting(self, digest: str, since: float, now: float) -> bool:
        """`mark_deleting` for a blob that nobody has registered since a time, whoever wrote it
        before.

        Nor was it noted since then that somebody else deletes it.
        """
        asked = "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM blobs WHERE digest = ? AND written > ?)"
        noted = max(since, now - DELETION_LEASE_SECONDS)
        return self._mark(digest, now, noted, asked, (digest, since))

    def gone(self, digest: str, noted: float) -> tuple[str, int] | None:
        """Confirm a deletion; return the tenant and bytes of the blob if this machine had
        registered it.

        Args:
            noted: when that was to be.
        """
        with self._manifest.writing() as rows:
            if not self._over(rows, digest, noted):
                return None  # another process has settled it after the time limit
            found = rows("DELETE FROM blobs WHERE digest = ? RETURNING tenant, bytes", (digest,))
        return found[0] if found else None

    def cancel_deletion(self, digest: str, noted: float) -> None:
        """End a deletion, whatever happened to the blob."""
        with self._manifest.writing() as rows:
            self._over(rows, digest, noted)

    def renew_deletion(self, digest: str, noted: float, now: float) -> None:
        """Extend the mark of a deletion that is still in progress."""
        with self._manifest.writing() as rows:
            rows(
                "UPDATE leaving SET since = ? WHERE digest = ? AND since = ?", (now, digest, noted)
            )

    def _mark(
        self, digest: str, now: float, noted: float, statement: str, values: tuple[Any, ...]
    ) -> bool:
        with self._manifest.writing() as rows:
            is_needed = rows(REFERENCED_QUERY, (digest, digest))
            if is_needed or _is_being_deleted(rows, digest, noted) or not rows(statement, values):
                return False
            rows("INSERT OR REPLACE INTO leaving VALUES (?, ?)", (digest, now))
        return True

    def _over(self, rows: Callable[..., list[Any]], digest: str, noted: float) -> bool:
        own = "DELETE FROM leaving WHERE digest = ? AND since = ? RETURNING 1"
        return bool(rows(own, (digest, noted)))

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

    def written_since(self, since: float) -> set[str]:
        """Digests of blobs that processes of this machine have registered since a time."""
        with self._manifest.reading() as rows:
            return {
                digest for (digest,) in rows("SELECT digest FROM blobs WHERE written > ?", (since,))
            }

    def _total(self, rows: Callable[..., list[Any]]) -> int:
        [(total,)] = rows("SELECT coalesce(sum(bytes), 0) FROM totals")
        return total

    def tenants_by_digest(self) -> dict[str, str]:
        """Tenant each blob is charged to, by digest."""
        with self._manifest.reading() as rows:
            return dict(rows("SELECT digest, tenant FROM blobs"))

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


def _is_being_deleted(rows: Callable[..., list[Any]], digest: str, since: float) -> bool:
    return bool(rows("SELECT 1 FROM leaving WHERE digest = ? AND since > ?", (digest, since)))


POLL_SECONDS = 0.01  # between two looks whether a deletion is over


@dataclass
class _Deletion:
    """Deletion in progress.

    Args:
        noted: what the index knows it by.
        over: set once it is, be it long after its time limit.
        is_abandoned: nobody waits for it any more.
    """

    digest: str
    noted: float
    over: threading.Event = field(default_factory=threading.Event)
    is_abandoned: bool = False


@dataclass(frozen=True)
class DeletionResult:
    """Result of deleting a blob.

    Args:
        freed: bytes of what lay there.
        is_quarantined: nothing did, but a damaged one lies out of the way.
        kept: in whose name the index had it, and its bytes; None where no process of this machine
            has put it.
    """

    freed: int
    is_quarantined: bool
    kept: tuple[str, int] | None


class PendingDeletions:
    """Deletions that the index has marked. Safe from threads.

    Args:
        seconds: to wait for a deletion by somebody else.
    """

    def __init__(
        self, blobs: BlobStore, holdings: BlobIndex, clock: Callable[[], float], seconds: float
    ) -> None:
        self._blobs, self._holdings = blobs, holdings
        self._clock, self._seconds = clock, seconds
        self._lock = threading.Lock()
        self._under_way: list[_Deletion] = []

    def delete(self, digest: str, noted: float) -> DeletionResult:
        """Delete a blob and confirm it in the index when the call ends.

        Args:
            noted: when the index was told that it is about to go.

        Raises:
            StoreError: the disk fails, or takes too long; then the blob may go later.
        """
        one = _Deletion(digest, noted)
        with self._lock:
            self._under_way.append(one)
        try:
            freed, is_aside = self._blobs.delete(digest, one.over.set)
            with self._lock:
                kept = self._holdings.gone(digest, one.noted)
                self._under_way.remove(one)
        except BaseException:
            one.is_abandoned = True
            with suppress(StoreError):  # it is told later
                self.settle()
            raise
        return DeletionResult(freed, is_aside, kept)

    def settle(self) -> None:
        """Confirm deletions that have ended in the meantime and renew those in progress."""
        with self._lock:
            for one in [*self._under_way]:
                now = self._clock()
                if one.is_abandoned and one.over.is_set():
                    self._holdings.cancel_deletion(one.digest, one.noted)
                    self._under_way.remove(one)
                elif one.noted <= now - DELETION_LEASE_SECONDS / 2:
                    self._holdings.renew_deletion(one.digest, one.noted, now)
                    one.noted = now

    def await_end(self, digest: str, is_over: Callable[[str], bool]) -> None:
        """Wait until no process is deleting a blob.

        Raises:
            StoreSlow: it still is.
        """
        until = time.monotonic() + self._seconds
        while not is_over(digest):
            if time.monotonic() > until:
                raise StoreSlow(
                    f"Blob {digest[:12]} was being deleted for {self._seconds:g} s, and cannot be "
                    "written before the deletion ends: try again, and check the disk."
                )
            time.sleep(POLL_SECONDS)
