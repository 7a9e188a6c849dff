"""Components of an open store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from larder.core.errors import Damaged, StoreError
from larder.store.blobs.blob_store import BlobStore
from larder.store.blobs.reclamation import DiskEviction, GarbageCollection
from larder.store.blobs.tenant_blobs import TenantBlobs
from larder.store.digests import key_of, tenant_of
from larder.store.encryption import open_encryption, store_secret
from larder.store.eviction.base import EvictionPolicy
from larder.store.eviction.lru import Lru
from larder.store.failures import FailureCounter
from larder.store.fs import open_file_system
from larder.store.fs.base import FileSystem
from larder.store.fs.deadline import CallLimits, DeadlineExecutor
from larder.store.fs.wrappers import CountingFileSystem, EncryptedFileSystem
from larder.store.ledger import ByteBudgets, ByteLedger
from larder.store.manifest import Manifest
from larder.store.prefix.chunk_index import ChunkIndex
from larder.store.sessions.cache_writer import CacheWriter
from larder.store.sessions.epochs import KEPT_EPOCHS, BranchNotes, SessionEpochs
from larder.store.sessions.records import Record
from larder.store.sessions.session_reader import SessionReader
from larder.store.sqlite import BUSY_SECONDS, OWNER_PRAGMA, claim_owner, quarantine_database
from larder.store.throughput import ThroughputEstimates

MANIFEST_FILE = "manifest.sqlite"  # of the first store of a home folder
# Between a tenant and a model in the principal of the tenant's sessions there; tenants have none in
# their names.
MODEL_SEPARATOR = "@"


class StoreComponents:
    """Components of an open store. Safe from threads and processes, like each of them.

    A damaged or foreign index is moved aside and rebuilt from the records beside the blobs; an
    incomplete one is completed.

    Args:
        url: a folder, an address of fsspec, or a file system.
        home: folder of the index and the secret, on this machine.
        secret: 32 bytes, the same on all machines that share the store; None for that of `home`.
        key: encryption key, as `read_key` returns it; None for no encryption.
        budgets: bytes of each tier.
        call_limits: of calls to the disk.
        written_bytes: daily limit of bytes written to the disk; None for no limit.
        kept_epochs: number of states that are retained per session, 1 or more.
        eviction: eviction policy of a full disk.
        models: names after `MODEL_SEPARATOR` in principals that share the budget of the principal
            without one.
        clock: seconds since 1970.

    `refusals` counts failed restores, `unwritten` failed writes, by reason.

    Raises:
        StoreError: it cannot be opened.
    """

    def __init__(
        self,
        url: str | FileSystem,
        home: Path,
        *,
        secret: bytes | None = None,
        key: bytes | None = None,
        budgets: ByteBudgets = ByteBudgets(),  # noqa: B008, frozen
        call_limits: CallLimits = CallLimits(),  # noqa: B008, frozen
        written_bytes: int | None = None,
        kept_epochs: int = KEPT_EPOCHS,
        eviction: EvictionPolicy = Lru(),  # noqa: B008, frozen
        models: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._models = tuple(models)
        opened = open_file_system(url) if isinstance(url, str) else url
        self.file_system = CountingFileSystem(opened)
        self.refusals, self.unwritten = FailureCounter(), FailureCounter()
        self.throughput, self.ledger = ThroughputEstimates(), ByteLedger(budgets)
        self.clock, self.kept_epochs = clock, kept_epochs
        self.secret = store_secret(home) if secret is None else secret
        self.executor = DeadlineExecutor("disk", call_limits)
        self.encryption = open_encryption(self.file_system, self.executor, key)
        self.records = EncryptedFileSystem(self.file_system, self.encryption)
        self._call_limits = _index_limits(call_limits)
        self.manifest = self._index(home)
        self.epochs = SessionEpochs(
            self.records, self.executor, self.manifest, self.secret, self._damaged
        )
        self.chunks = ChunkIndex(
            self.records, self.executor, self.manifest, self.secret, self.encryption
        )
        self.branches = BranchNotes(self.records, self.executor, self.secret)
        self._catch_up()
        self.blobs = self._new_blobs(written_bytes)
        DiskEviction(eviction, self.manifest, self.epochs, self.chunks, self.blobs)
        self.garbage = GarbageCollection(self.chunks, self.blobs)
        self.writer = CacheWriter(self.blobs, self.chunks)
        self.reader = SessionReader(self.blobs, self.throughput)

    def tenant(self, principal: str) -> str:
        """Tenant id of a principal, as used in keys and paths."""
        tenant = tenant_of(self.secret, principal)
        if self._models and len(self.ledger.group_of(tenant)) == 1:
            owner = principal.partition(MODEL_SEPARATOR)[0]
            names = (owner, *(f"{owner}{MODEL_SEPARATOR}{each}" for each in self._models))
            self.ledger.group({tenant, *(tenant_of(self.secret, name) for name in names)})
        return tenant

    def commit(self, record: Record, is_new: bool = False) -> Record:
        """Commit an epoch of a session, then drop the epochs that are no longer retained.

        Raises:
            Superseded: another writer has committed an epoch since the previous one.
        """
        self.epochs.commit(record, record.previous, is_new)
        self.garbage.states(self.epochs.prune(record.key, self.kept_epochs))
        return record

    def close(self) -> None:
        """Close the index."""
        self.manifest.close()

    def _new_blobs(self, written_bytes: int | None) -> TenantBlobs:
        """Blobs of all tenants, under a daily limit."""
        return TenantBlobs(
            BlobStore(self.file_system, self.executor, self.clock),
            self.encryption,
            self.file_system,
            self.executor,
            self.manifest,
            self.ledger,
            written_bytes,
        )

    def _index(self, home: Path) -> Manifest:
        """Index of this store; other stores known to `home` have their own."""
        number = _store_number(self.file_system.url, home)
        manifest = self._manifest(home / MANIFEST_FILE)
        with manifest.reading() as rows:
            [(owner,)] = rows(OWNER_PRAGMA)
        if not owner:
            with manifest.writing() as rows:
                owner = claim_owner(rows, number)
        if owner == number:
            return manifest
        manifest.close()
        return self._manifest(home / f"manifest-{number:08x}.sqlite")

    def _manifest(self, path: Path) -> Manifest:
        try:
            return self._open_manifest(path)
        except Damaged as error:
            self._damaged(str(error))
            quarantine_database(path)
            return self._open_manifest(path)

    def _open_manifest(self, path: Path) -> Manifest:
        return Manifest(path, self.secret, self.clock, self.encryption, self._call_limits)

    def _catch_up(self) -> None:
        """Index the records beside the blobs, as far as the disk returns them in time."""
        try:
            self.epochs.sync_manifest()
            if not self.manifest.is_built:
                self.chunks.rebuild()
                self.manifest.mark_built()
        except StoreError as error:
            self._damaged(f"The index may lack sessions: {error}")

    def _damaged(self, message: str) -> None:
        self.refusals.note("manifest", message)


def _index_limits(call_limits: CallLimits) -> CallLimits:
    """Limits of calls to the index, which wait for its lock at most."""
    seconds = min(call_limits.seconds, BUSY_SECONDS)
    rest_seconds = min(call_limits.rest_seconds, BUSY_SECONDS)
    return CallLimits(seconds, max_failures=1, rest_seconds=rest_seconds)


def _store_number(url: str, home: Path) -> int:
    """31-bit number of a store, never 0; a store inside its home moves with it."""
    with suppress(ValueError):
        url = str(Path(url).relative_to(home.expanduser().absolute()))
    return int(key_of("store", url)[:8], 16) >> 1 or 1
