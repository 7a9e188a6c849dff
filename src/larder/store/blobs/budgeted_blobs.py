"""Blobs under the byte budget of the disk tier: bytes are reserved before they are written."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from larder.core.errors import BudgetError, StoreError
from larder.store.blobs.blob_index import BlobIndex, PendingDeletions
from larder.store.blobs.blob_store import BlobRef
from larder.store.blobs.disk_usage import CountingFileSystem, DiskUsage
from larder.store.blobs.tenant_blobs import TenantBlobs
from larder.store.digests import digest_of
from larder.store.fs.deadline import DeadlineExecutor, parallel_map
from larder.store.ledger import NO_TENANT, ByteLedger, Reservation, Tier
from larder.store.manifest import Manifest
from larder.store.sqlite import BUSY_SECONDS

DAY_SECONDS = 86400
NEVER_WRITTEN = float("-inf")
GRACE_SECONDS = 600.0  # age below which unreferenced blobs may belong to a save in progress
# By how much index and records grow when a session is saved, and for each chunk of it, at most.
SESSION_METADATA_BYTES = 64 * 1024
CHUNK_METADATA_BYTES = 8 * 1024


class BudgetedBlobs:
    """Blobs and metadata of a store under its disk budget. Safe from threads and processes.

    Args:
        written_bytes: that may be written in a day; None for no limit.
    """

    def __init__(
        self,
        vault: TenantBlobs,
        place: CountingFileSystem,
        guard: DeadlineExecutor,
        manifest: Manifest,
        ledger: ByteLedger,
        written_bytes: int | None = None,
    ) -> None:
        self.vault, self.blobs, self.ledger = vault, vault.blobs, ledger
        self.holdings = BlobIndex(manifest)
        self._manifest = manifest
        self._account = DiskUsage(place, guard, manifest, self.holdings, ledger)
        waits = min(guard.limits.seconds, BUSY_SECONDS)
        self._deletions = PendingDeletions(self.blobs, self.holdings, manifest.clock, waits)
        self.make_room: Callable[[str, int], None] = lambda tenant, count: None
        self._written_bytes = written_bytes
        self._lock = threading.RLock()
        self._pins: Counter[str] = Counter()  # digests that are not to be deleted now
        self._finished_writes: deque[str] = deque()  # of those, what is written by now
        self._own: dict[str, float] = {}  # time of each blob this process has written
        self._count()

    @contextmanager
    def saving(self, tenant: str) -> Iterator[BlobTransaction]:
        """Transaction of one save: its blobs are pinned until the end, and dropped if it fails."""
        made = BlobTransaction(self, tenant)
        try:
            yield made
        finally:
            with self._lock:
                self._pins.subtract(ref.digest for ref in made.refs)
                self._pins = +self._pins
            self._drop_quietly(made.refs)

    @contextmanager
    def reserve_metadata(self, chunks: int = 0) -> Iterator[None]:
        """Reservation for the records and index rows of a session and up to `chunks` new chunks.

        Raises:
            BudgetError: there is no room, even after eviction.
        """
        with self.reserve(NO_TENANT, SESSION_METADATA_BYTES + CHUNK_METADATA_BYTES * chunks):
            yield
        self.settle()

    def settle(self) -> None:
        """Charge growth of the index and records to the ledger."""
        self._deletions.settle()
        self._account.settle()

    def reserve(self, tenant: str, count: int) -> Reservation:
        """Reserve disk bytes, with eviction of other caches if needed.

        Raises:
            BudgetError: there is no room, even after eviction.
        """
        self._account.learn()
        try:
            return self.ledger.reserve(Tier.DISK, tenant, count)
        except BudgetError:
            self.make_room(tenant, count)
        return self.ledger.reserve(Tier.DISK, tenant, count)

    def drop(self, refs: Iterable[BlobRef]) -> int:
        """Delete blobs that are unreferenced and not in use; return the bytes freed.

        What other machines have put they may need, too: a sweep knows that, which looks at all.
        """
        return sum(parallel_map(self._drop, dict.fromkeys(refs)))

    def evict(self, refs: Iterable[BlobRef]) -> None:
        """Delete the blobs of evicted caches, whoever wrote them; their text is prefilled again."""
        for ref in dict.fromkeys(refs):
            if not self._drop(ref) and self.blobs.has(ref):
                self._drop_orphan(ref, NEVER_WRITTEN)

    def sweep(self, live: Iterable[str], grace_seconds: float = GRACE_SECONDS) -> int:
        """Garbage collection over every blob on the disk.

        Args:
            live: digests that something refers to; what the manifest needs is added.
        """
        with self._lock:
            self._settle_writes()
            before = self._manifest.clock() - max(grace_seconds, GRACE_SECONDS)
            self._own = {digest: at for digest, at in self._own.items() if at > before}
            since = self._manifest.clock() - grace_seconds
            keep = {*live, *self.holdings.live_digests(since), *self._pins}
        freed = self.blobs.sweep(keep, grace_seconds, lambda ref: self._drop_orphan(ref, since))
        with self._lock:
            self._count(grace_seconds)
        return freed

    def hold(self, ref: BlobRef, tenant: str, data: bytes) -> None:
        """Write a blob under the budget unless it exists."""
        self._deletions.await_end(ref.digest, self.touch)
        if self.blobs.has(ref):
            self.blobs.put(data)
            return
        with self.reserve(tenant, ref.bytes) as reservation:
            self._count_written(ref.bytes)
            with self._lock:
                now = self._manifest.clock()
                self._account.add_blob(ref, tenant, now)
                self._own[ref.digest] = now
                reservation.keep()  # from now on the index has it, whatever becomes of the writing
        self.pin(ref.digest)
        self.blobs.put(data, lambda: self._finished_writes.append(ref.digest))

    def pin(self, digest: str) -> None:
        """Protect a blob from deletion until its transaction ends."""
        with self._lock:
            self._pins[digest] += 1

    def touch(self, digest: str) -> bool:
        """Protect a blob that is about to be referenced; False if it is being deleted.

        To be said before it is looked at: then who drops it has done so, or cannot any more. False
        while it is being deleted: then it is not there, whatever the disk says.
        """
        with self._lock:
            now, own = self._manifest.clock(), self._own.get(digest, NEVER_WRITTEN)
            if own > now - GRACE_SECONDS / 2 and self.holdings.written_at(digest) == own:
                return True
            self._deletions.settle()
            is_free = self.holdings.touch(digest, now)
            if is_free:
                self._own[digest] = now
        return is_free

    def release_ownership(self, refs: Iterable[BlobRef]) -> None:
        """Leave blobs written by this process to the next sweep."""
        with self._lock:
            for ref in refs:
                self._own.pop(ref.digest, None)

    def is_in_use(self, ref: BlobRef) -> bool:
        """True if a process of this machine is about to refer to a blob, or recently did."""
        with self._lock:
            self._settle_writes()
            put, own = (
                self.holdings.written_at(ref.digest),
                self._own.get(ref.digest, NEVER_WRITTEN),
            )
            is_others = put not in (None, own) and put > self._manifest.clock() - GRACE_SECONDS
            return bool(self._pins[ref.digest]) or is_others

    def pending_digests(self, since: float) -> set[str]:
        """Digests of blobs registered since a time or pinned now."""
        with self._lock:
            return {*self._pins, *self.holdings.written_since(since)}

    def _drop(self, ref: BlobRef) -> int:
        with self._lock:
            now, own = self._manifest.clock(), self._own.get(ref.digest, NEVER_WRITTEN)
            if self._is_referenced(ref) or not self.holdings.mark_deleting(
                ref.digest, own, now - GRACE_SECONDS, now
            ):
                return 0
        return self._delete(ref, now)

    def _drop_orphan(self, ref: BlobRef, since: float) -> int:
        """Delete a blob of any writer unless this machine has registered it since a time."""
        with self._lock:
            now = self._manifest.clock()
            if self._is_referenced(ref) or not self.holdings.mark_orphan_deleting(
                ref.digest, since, now
            ):
                return 0
        return self._delete(ref, now)

    def _delete(self, ref: BlobRef, noted: float) -> int:
        """Delete a blob marked in the index without holding the lock; return the bytes freed."""
        own = self._own.get(ref.digest)
        told = self._deletions.delete(ref.digest, noted)
        with self._lock:
            if self._own.get(ref.digest) == own:  # else it was put anew
                self._own.pop(ref.digest, None)
            if told.kept is None:
                self._account.remove_foreign_blob(ref)
            else:
                whose, counted = told.kept
                self._account.remove_blob(
                    whose, counted, counted if told.is_quarantined else 0
                )  # as much there
        return told.freed

    def _is_referenced(self, ref: BlobRef) -> bool:
        self._settle_writes()
        return bool(self._pins[ref.digest]) or self.holdings.is_referenced(ref.digest)

    def _settle_writes(self) -> None:
        """Release what ended calls held, including calls that ended after their time limit."""
        self._deletions.settle()
        while self._finished_writes:
            self._pins[self._finished_writes.popleft()] -= 1
        self._pins = +self._pins

    def _drop_quietly(self, refs: Iterable[BlobRef]) -> None:
        """Drop blobs after a failed save; errors are ignored, because a sweep drops them later."""
        try:
            self.drop(ref for ref in refs if not self.holdings.is_referenced(ref.digest))
        except StoreError:
            return

    def _count(self, grace_seconds: float = GRACE_SECONDS) -> None:
        self._account.count(self._pins, self._manifest.clock() - grace_seconds)

    def _count_written(self, count: int) -> None:
        """Add to the bytes written today.

        Raises:
            BudgetError: the daily write limit is exceeded.
        """
        day = int(self._manifest.clock() // DAY_SECONDS)
        written = self.holdings.count_written(day, count, self._written_bytes)
        if written is not None:
            raise BudgetError(
                f"Writing {count} bytes exceeds the daily write limit: {written} of "
                f"{self._written_bytes} bytes are used. Save less often or in fewer bits, or raise "
                "the limit."
            )


class BlobTransaction:
    """Blobs of one save for one tenant."""

    def __init__(self, shelves: BudgetedBlobs, tenant: str) -> None:
        self._shelves, self._tenant = shelves, tenant
        self.refs: list[BlobRef] = []

    @contextmanager
    def commit_record(self) -> Iterator[None]:
        """Context in which the record that refers to these blobs is written.

        Where that fails it may come about later, long after its time limit: what it names stays
        until a sweep, which sees whether it has.
        """
        try:
            yield
        except StoreError:
            self._shelves.release_ownership(self.refs)
            raise

    def put(self, data: bytes) -> BlobRef:
        """Write a blob under the budget.

        Raises:
            BudgetError: there is no room, also not by having others leave; or too much was
                written today.
            StoreFull, StoreSlow: the disk takes no more, or does not answer.
        """
        data = self._shelves.vault.closed(data, self._tenant)
        ref = BlobRef(digest_of(data), len(data))
        self._shelves.pin(ref.digest)
        self.refs.append(ref)
        self._shelves.hold(ref, self._tenant, data)
        return ref

    def stays(self, ref: BlobRef) -> bool:
        """True if a blob exists; it is then protected until the transaction ends."""
        self._shelves.pin(ref.digest)
        self.refs.append(ref)
        return self._shelves.touch(ref.digest) and self._shelves.blobs.has(ref)
