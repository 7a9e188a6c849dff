"""Blobs of tenants: encrypted, reference-counted, and under the byte budget of the disk tier."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from larder.core.errors import BudgetError, StoreError
from larder.store.blobs.blob_index import BlobIndex, PendingDeletions
from larder.store.blobs.blob_store import BlobRef, BlobStore, digest_in_path
from larder.store.digests import digest_of
from larder.store.encryption import Encryption
from larder.store.fs.base import TEMPORARY_FOLDER, FileInfo
from larder.store.fs.deadline import DeadlineExecutor, parallel_map
from larder.store.fs.wrappers import CountingFileSystem
from larder.store.ledger import NO_TENANT, ByteLedger, Reservation, Tier
from larder.store.manifest import Manifest
from larder.store.sqlite import BUSY_SECONDS

DAY_SECONDS = 86400
NEVER_WRITTEN = float("-inf")
GRACE_SECONDS = 600.0  # age below which unreferenced blobs may belong to a save in progress
# Growth of index and records when a session is saved, and for each chunk of it, at most.
SESSION_METADATA_BYTES = 64 * 1024
CHUNK_METADATA_BYTES = 8 * 1024


class TenantBlobs:
    """Blobs of all tenants. Safe from threads and processes.

    Bytes are reserved before they are written. A blob is protected from deletion while a session
    or a chunk refers to it in the index, and while a transaction of this process has it pinned.

    Args:
        written_bytes: daily limit of bytes written; None for no limit.
    """

    def __init__(
        self,
        files: BlobStore,
        encryption: Encryption,
        file_system: CountingFileSystem,
        executor: DeadlineExecutor,
        manifest: Manifest,
        ledger: ByteLedger,
        written_bytes: int | None = None,
    ) -> None:
        self.files, self.ledger, self.index = files, ledger, BlobIndex(manifest)
        self._encryption, self._clock = encryption, manifest.clock
        self._usage = DiskUsage(file_system, executor, manifest, self.index, ledger)
        wait_seconds = min(executor.limits.seconds, BUSY_SECONDS)
        self._deletions = PendingDeletions(files, self.index, manifest.clock, wait_seconds)
        self.make_room: Callable[[str, int], None] = lambda tenant, count: None
        # Deletes what nothing refers to at the end of a save; of several parts of the store.
        self.collect: Callable[[str, Collection[BlobRef]], object] = lambda _, refs: self.drop(refs)
        self._written_bytes = written_bytes
        self._lock = threading.RLock()
        self._pins: Counter[str] = Counter()  # digests that are not to be deleted now
        self._finished_writes: deque[str] = deque()  # pinned digests whose write has ended
        self._own: dict[str, float] = {}  # time of each blob this process has written
        self._recount()

    def get(self, ref: BlobRef, tenant: str) -> bytes:
        """Read, verify and decrypt a blob.

        Raises:
            Damaged: as `BlobStore.get`, or it is another tenant's.
        """
        return self._encryption.decrypt(tenant, self.files.get(ref))

    @contextmanager
    def saving(self, tenant: str) -> Iterator[BlobTransaction]:
        """Transaction of one save: its blobs are pinned until the end. Those that nothing refers to
        then are deleted, with prefix chunks that no session refers to: the save has failed, or its
        session was removed meanwhile."""
        transaction = BlobTransaction(self, tenant)
        try:
            yield transaction
        finally:
            with self._lock:
                self._pins.subtract(ref.digest for ref in transaction.refs)
                self._pins = +self._pins
            self._collect_quietly(tenant, transaction.refs)

    def put(self, data: bytes, tenant: str, register: Callable[[BlobRef], None]) -> BlobRef:
        """Encrypt and write a blob under the budget, unless it exists.

        Args:
            register: called with the reference once it is pinned, before anything is written.

        Raises:
            BudgetError: there is no room, even after eviction; or too much was written today.
            StoreFull, StoreSlow: the disk takes no more, or does not answer.
        """
        data = self._encryption.encrypt(tenant, data)
        ref = BlobRef(digest_of(data), len(data))
        self.pin(ref.digest)
        register(ref)
        self._deletions.await_end(ref.digest, self.touch)
        if self.files.has(ref):
            self.files.put(data)  # so that a sweep leaves it until it is referenced
            return ref
        with self.reserve(tenant, ref.bytes) as reservation:
            self._count_written(ref.bytes)
            with self._lock:
                now = self._clock()
                self._usage.add_blob(ref, reservation, now)
                self._own[ref.digest] = now
        self.pin(ref.digest)
        self.files.put(data, lambda: self._finished_writes.append(ref.digest))
        return ref

    def pin(self, digest: str) -> None:
        """Protect a blob from deletion until its transaction ends."""
        with self._lock:
            self._pins[digest] += 1

    def touch(self, digest: str) -> bool:
        """Protect a blob that is about to be referenced; False if it is being deleted.

        Call this before looking whether the blob exists: a blob that is being deleted counts as
        missing, regardless of the disk.
        """
        with self._lock:
            now, own = self._clock(), self._own.get(digest, NEVER_WRITTEN)
            if own > now - GRACE_SECONDS / 2 and self.index.written_at(digest) == own:
                return True
            self._deletions.settle()
            is_free = self.index.touch(digest, now)
            if is_free:
                self._own[digest] = now
        return is_free

    def is_in_use(self, ref: BlobRef) -> bool:
        """True if a process of this machine is about to refer to a blob, or recently did."""
        with self._lock:
            self._settle_writes()
            written, own = self.index.written_at(ref.digest), self._own_time(ref)
            is_others = written not in (None, own) and written > self._clock() - GRACE_SECONDS
            return bool(self._pins[ref.digest]) or is_others

    def pending_digests(self, since: float) -> set[str]:
        """Digests of blobs registered since a time or pinned now."""
        with self._lock:
            return {*self._pins, *self.index.digests(since)}

    @contextmanager
    def reserve_metadata(self, chunks: int = 0) -> Iterator[None]:
        """Reservation for the records and index rows of a session and up to `chunks` new chunks.

        Raises:
            BudgetError: there is no room, even after eviction.
        """
        with self.reserve(NO_TENANT, SESSION_METADATA_BYTES + CHUNK_METADATA_BYTES * chunks):
            yield
        self.settle()

    def reserve(self, tenant: str, count: int) -> Reservation:
        """Reserve disk bytes, with eviction of other caches if needed.

        Raises:
            BudgetError: there is no room, even after eviction.
        """
        self._usage.update()
        try:
            return self.ledger.reserve(Tier.DISK, tenant, count)
        except BudgetError:
            self.make_room(tenant, count)
        return self.ledger.reserve(Tier.DISK, tenant, count)

    def settle(self) -> None:
        """Settle deletions, and charge growth of the index and records to the ledger."""
        self._deletions.settle()
        self._usage.charge_metadata()

    def drop(self, refs: Iterable[BlobRef]) -> int:
        """Delete blobs that are unreferenced and not in use; return the bytes freed.

        Blobs that other machines have written are left to a sweep, which knows all references.
        """
        return sum(parallel_map(self._drop, dict.fromkeys(refs)))

    def evict(self, refs: Iterable[BlobRef]) -> None:
        """Delete the blobs of evicted caches, of any writer; their text is prefilled again."""
        for ref in dict.fromkeys(refs):
            if not self._drop(ref) and self.files.has(ref):
                self._drop_orphan(ref, NEVER_WRITTEN)

    def release_ownership(self, refs: Iterable[BlobRef]) -> None:
        """Leave blobs written by this process to the next sweep."""
        with self._lock:
            for ref in refs:
                self._own.pop(ref.digest, None)

    def sweep(self, live: Iterable[str], grace_seconds: float = GRACE_SECONDS) -> int:
        """Garbage collection over every blob on the disk; return the bytes freed.

        Args:
            live: referenced digests; those that the index knows are added.
        """
        with self._lock:
            self._settle_writes()
            before = self._clock() - max(grace_seconds, GRACE_SECONDS)
            self._own = {digest: at for digest, at in self._own.items() if at > before}
            since = self._clock() - grace_seconds
            keep = {*live, *self.index.live_digests(since), *self._pins}
        freed = self.files.sweep(keep, grace_seconds, lambda ref: self._drop_orphan(ref, since))
        with self._lock:
            self._recount(grace_seconds)
        return freed

    def _drop(self, ref: BlobRef) -> int:
        """Delete a blob that no other process has written lately; return the bytes freed."""
        with self._lock:
            now, own = self._clock(), self._own_time(ref)
            if self._is_referenced(ref) or not self.index.mark_deleting(
                ref.digest, own, now - GRACE_SECONDS, now
            ):
                return 0
        return self._delete(ref, now)

    def _drop_orphan(self, ref: BlobRef, since: float) -> int:
        """Delete a blob of any writer unless this machine has registered it since a time."""
        with self._lock:
            now = self._clock()
            if self._is_referenced(ref) or not self.index.mark_orphan_deleting(
                ref.digest, since, now
            ):
                return 0
        return self._delete(ref, now)

    def _delete(self, ref: BlobRef, marked: float) -> int:
        """Delete a blob marked in the index without holding the lock; return the bytes freed."""
        own = self._own.get(ref.digest)
        result = self._deletions.delete(ref.digest, marked)
        with self._lock:
            if self._own.get(ref.digest) == own:  # otherwise it was written again meanwhile
                self._own.pop(ref.digest, None)
            if result.registered is None:
                self._usage.remove_foreign(ref)
            else:
                tenant, counted = result.registered
                self._usage.remove_blob(tenant, counted, counted if result.is_quarantined else 0)
        return result.freed

    def _own_time(self, ref: BlobRef) -> float:
        return self._own.get(ref.digest, NEVER_WRITTEN)

    def _is_referenced(self, ref: BlobRef) -> bool:
        self._settle_writes()
        return bool(self._pins[ref.digest]) or self.index.is_referenced(ref.digest)

    def _settle_writes(self) -> None:
        """Release the pins of ended writes, including those that ended after their time limit."""
        self._deletions.settle()
        while self._finished_writes:
            self._pins[self._finished_writes.popleft()] -= 1
        self._pins = +self._pins

    def _collect_quietly(self, tenant: str, refs: Collection[BlobRef]) -> None:
        """Delete what nothing refers to; errors are ignored, because a sweep deletes it later."""
        with suppress(StoreError):
            self.collect(tenant, refs)

    def _recount(self, grace_seconds: float = GRACE_SECONDS) -> None:
        self._usage.recount(self._pins, self._clock() - grace_seconds)

    def _count_written(self, count: int) -> None:
        """Add to the bytes written today.

        Raises:
            BudgetError: the daily write limit is exceeded.
        """
        day = int(self._clock() // DAY_SECONDS)
        written = self.index.count_written(day, count, self._written_bytes)
        if written is not None:
            raise BudgetError(
                f"Writing {count} bytes exceeds the daily write limit: {written} of "
                f"{self._written_bytes} bytes are used. Save less often or in fewer bits, or raise "
                "the limit."
            )


class BlobTransaction:
    """Blobs of one save for one tenant."""

    def __init__(self, blobs: TenantBlobs, tenant: str) -> None:
        self._blobs, self.tenant = blobs, tenant
        self.refs: list[BlobRef] = []

    @contextmanager
    def commit_record(self) -> Iterator[None]:
        """Context in which the record that refers to these blobs is written.

        A record whose write failed may still appear, long after its time limit: its blobs stay
        until a sweep, which sees whether it has.
        """
        try:
            yield
        except StoreError:
            self._blobs.release_ownership(self.refs)
            raise

    def put(self, data: bytes) -> BlobRef:
        """Write a blob under the budget.

        Raises:
            BudgetError, StoreFull, StoreSlow: as `TenantBlobs.put`.
        """
        return self._blobs.put(data, self.tenant, self.refs.append)

    def retain(self, ref: BlobRef) -> bool:
        """True if a blob exists; it is then protected until the transaction ends."""
        self._blobs.pin(ref.digest)
        self.refs.append(ref)
        return self._blobs.touch(ref.digest) and self._blobs.files.has(ref)


class DiskUsage:
    """Disk accounts of a byte ledger, taken from the blob index. Safe from threads.

    Processes of one machine share the accounts of blobs, so that together they stay within the
    budget. Records of other processes, some kilobytes each, and blobs of other machines, which are
    charged to no tenant, are counted when the store is opened and by every sweep.
    """

    def __init__(
        self,
        file_system: CountingFileSystem,
        executor: DeadlineExecutor,
        manifest: Manifest,
        index: BlobIndex,
        ledger: ByteLedger,
    ) -> None:
        self._file_system, self._executor, self._manifest = file_system, executor, manifest
        self._index, self._ledger = index, ledger
        self._lock = threading.RLock()
        self._blob_bytes: Counter[str] = Counter()  # as charged to the ledger, by tenant
        self._foreign: set[str] = set()  # digests of blobs that are not in the index
        self._other_bytes = 0  # neither blobs of the index, nor metadata written since the recount
        self._metadata_bytes = 0  # as charged; growth is covered by reservations until it is

    def update(self) -> None:
        """Charge what this and other processes have written and deleted."""
        with self._lock:
            self._charge(Counter(self._index.bytes_by_tenant()))

    def charge_metadata(self) -> None:
        """Charge growth of the index and records."""
        with self._lock:
            self._metadata_bytes = self._manifest.nbytes + self._file_system.metadata_bytes
            self._charge(self._blob_bytes)

    def add_blob(self, ref: BlobRef, reservation: Reservation, now: float) -> None:
        """Register a blob that is about to be written, in place of its reservation.

        Raises:
            BudgetError: others have taken the room meanwhile; nothing has changed.
        """
        with self._lock:
            others = self._ledger.used(Tier.DISK) - self._blob_bytes.total() - ref.bytes
            room = self._ledger.limit(Tier.DISK) - others
            blob_bytes = self._blob_bytes.copy()
            blob_bytes[reservation.tenant] += self._index.add(ref, reservation.tenant, now, room)
            self._forget_foreign(ref)
            with self._ledger.lock:
                reservation.release()
                self._charge(blob_bytes)

    def remove_blob(self, tenant: str, count: int, quarantined_bytes: int) -> None:
        """Discharge a blob that has left the index; a quarantined copy is charged to no tenant."""
        with self._lock:
            self._other_bytes += quarantined_bytes
            self._blob_bytes[tenant] -= count
            self._charge(self._blob_bytes)

    def remove_foreign(self, ref: BlobRef) -> None:
        """Discharge a deleted blob that was not in the index."""
        with self._lock:
            self._forget_foreign(ref)
            self._charge(self._blob_bytes)

    def recount(self, pending: Collection[str], before: float) -> None:
        """Recount everything on the disk.

        A blob of the index counts in full, also while its file is being written.

        Args:
            pending: digests of blobs whose files may not exist yet.
            before: as in `BlobIndex.prune`.
        """
        with self._lock:
            counted = self._file_system.metadata_bytes  # what comes meanwhile may count twice
            files = self._executor.call(self._all_files)
            blobs = {digest: file.bytes for file in files if (digest := digest_in_path(file.path))}
            self._index.prune({*blobs, *pending}, before)
            registered = self._index.digests()
            blob_bytes = Counter(self._index.bytes_by_tenant())
            owned = sum(count for digest, count in blobs.items() if digest in registered)
            temporary = sum(
                file.bytes for file in files if file.path.startswith(f"{TEMPORARY_FOLDER}/")
            )
            unwritten = max(blob_bytes.total() - owned, 0)  # temporary files are a part of it
            total = sum(file.bytes for file in files)
            self._foreign = {digest for digest in blobs if digest not in registered}
            self._other_bytes = total - owned - min(temporary, unwritten) - counted
            self._metadata_bytes = self._manifest.nbytes + counted
            self._charge(blob_bytes)

    def _forget_foreign(self, ref: BlobRef) -> None:
        if ref.digest in self._foreign:  # one written after the last recount was never counted
            self._foreign.remove(ref.digest)
            self._other_bytes -= ref.bytes

    def _charge(self, blob_bytes: Counter[str]) -> None:
        self._blob_bytes = +blob_bytes
        others = max(self._metadata_bytes + self._other_bytes, 0)
        self._ledger.set(Tier.DISK, {**self._blob_bytes, NO_TENANT: others})

    def _all_files(self) -> list[FileInfo]:
        return list(self._file_system.list_files(""))
