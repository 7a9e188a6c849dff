"""Disk usage of a store by tenant, carried from the blob index to the byte ledger."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from larder.store.blobs.blob_index import BlobIndex
from larder.store.blobs.blob_store import BLOBS_FOLDER as BLOBS
from larder.store.blobs.blob_store import BlobRef, digest_in_path
from larder.store.fs.base import QUARANTINE_FOLDER, TEMPORARY_FOLDER, FileInfo, FileSystem
from larder.store.fs.deadline import DeadlineExecutor
from larder.store.ledger import NO_TENANT, ByteLedger, Tier
from larder.store.manifest import Manifest


class DiskUsage:
    """Disk accounts of a byte ledger. Safe from threads.

    Processes of one machine have one account of blobs, in the index, and none exceeds the budget by
    what another has written. Of the others' records, some kilobytes each, it learns when it opens;
    so of blobs that other machines have put, which count as nobody's.
    """

    def __init__(
        self,
        place: CountingFileSystem,
        guard: DeadlineExecutor,
        manifest: Manifest,
        holdings: BlobIndex,
        ledger: ByteLedger,
    ) -> None:
        self._place, self._guard, self._manifest = place, guard, manifest
        self._holdings, self._ledger = holdings, ledger
        self._lock = threading.RLock()
        self._known: Counter[str] = Counter()  # bytes of blobs that the ledger counts, by tenant
        self._foreign: set[str] = set()  # digests of those that it counts as nobody's
        self._index_bytes = 0

    def settle(self) -> None:
        """Charge growth of the index and records."""
        with self._lock:
            now = self._index()
            self._ledger.charge(Tier.DISK, NO_TENANT, now - self._index_bytes)
            self._index_bytes = now

    def learn(self) -> None:
        """Charge what other processes have written and deleted."""
        with self._lock:
            now = Counter(self._holdings.bytes_by_tenant())
            for tenant in now.keys() | self._known.keys():
                change = now[tenant] - self._known[tenant]
                if change:
                    self._ledger.charge(Tier.DISK, tenant, change)
            self._known = now

    def add_blob(self, ref: BlobRef, tenant: str, now: float) -> None:
        """Register a blob that is about to be written and charge its tenant.

        Raises:
            BudgetError: others have taken the room meanwhile; nothing has changed.
        """
        with self._lock:
            beside = self._ledger.used(Tier.DISK) - self._known.total() - ref.bytes
            room = self._ledger.limit(Tier.DISK) - beside
            self._known[tenant] += self._holdings.kept(ref, tenant, now, room)
            self.remove_foreign_blob(ref)

    def remove_blob(self, tenant: str, count: int, left: int = 0) -> None:
        """Discharge a blob of `count` bytes, of which `left` bytes remain on the disk."""
        with self._lock:
            self._known[tenant] -= count
            self._ledger.discharge(Tier.DISK, tenant, count - left)

    def remove_foreign_blob(self, ref: BlobRef) -> None:
        """Discharge a blob without a tenant; one written after the last count was never charged."""
        with self._lock:
            if ref.digest in self._foreign:
                self._foreign.remove(ref.digest)
                self._ledger.discharge(Tier.DISK, NO_TENANT, ref.bytes)

    def count(self, making: Iterable[str], before: float) -> None:
        """Recount everything on the disk and set the accounts to the result.

        A blob that the index names counts in full, also while its file is still in the making.

        Args:
            making: digests of blobs that may not be there yet.
            before: as in `BlobIndex.prune`.
        """
        with self._lock:
            index = self._index()
            entries = self._guard.call(self._everything)
            blobs = {digest: each.bytes for each in entries if (digest := _blob_digest(each))}
            self._holdings.prune({*blobs, *making}, before)
            owners, self._known = (
                self._holdings.tenants_by_digest(),
                Counter(self._holdings.bytes_by_tenant()),
            )
            self._index_bytes = min(index, self._index())  # what comes meanwhile may count twice
            owned = sum(count for digest, count in blobs.items() if digest in owners)
            made = sum(
                each.bytes for each in entries if each.path.startswith(f"{TEMPORARY_FOLDER}/")
            )
            unmade = max(self._known.total() - owned, 0)  # of which temporary files are a part
            beside = sum(each.bytes for each in entries) - owned - min(made, unmade)
            self._foreign = {digest for digest in blobs if digest not in owners}
            counts = self._known + Counter({NO_TENANT: self._manifest.nbytes + beside})
            self._ledger.set(Tier.DISK, counts)

    def _index(self) -> int:
        return self._manifest.nbytes + self._place.metadata_bytes

    def _everything(self) -> list[FileInfo]:
        return list(self._place.list_files(""))


def _blob_digest(entry: FileInfo) -> str:
    """The digest of a blob; empty for everything else."""
    return digest_in_path(entry.path) if entry.path.startswith(BLOBS) else ""


_OTHERS = (f"{BLOBS}/", f"{QUARANTINE_FOLDER}/", f"{TEMPORARY_FOLDER}/")


class CountingFileSystem(FileSystem):
    """File system wrapper that counts metadata and written bytes. Safe from threads.

    `metadata_bytes` and `written_bytes`, blobs included, are since it was opened, by this process.
    """

    def __init__(self, inner: FileSystem) -> None:
        self.inner, self.url = inner, inner.url
        self.metadata_bytes = self.written_bytes = 0
        self._lock = threading.Lock()

    def create(self, path: str, data: bytes) -> None:
        self.inner.create(path, data)
        self._count(path, len(data), len(data))

    def replace(self, path: str, data: bytes) -> None:
        before = 0 if path.startswith(_OTHERS) else self.inner.size(path) or 0
        self.inner.replace(path, data)
        self._count(path, len(data) - before, len(data))

    def read(self, path: str) -> bytes:
        return self.inner.read(path)

    def size(self, path: str) -> int | None:
        return self.inner.size(path)

    def touch(self, path: str, data: bytes) -> None:
        self.inner.touch(path, data)

    def remove(self, path: str) -> None:
        before = 0 if path.startswith(_OTHERS) else self.inner.size(path) or 0
        self.inner.remove(path)
        self._count(path, -before)

    def set_aside(self, path: str) -> None:
        self.inner.set_aside(path)

    def list_files(self, folder: str) -> Iterator[FileInfo]:
        return self.inner.list_files(folder)

    def _count(self, path: str, count: int, written: int = 0) -> None:
        with self._lock:
            self.written_bytes += written
            if not path.startswith(_OTHERS):
                self.metadata_bytes += count
