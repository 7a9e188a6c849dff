"""Maintenance of a store: verification, sweep, and removal of tombstones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from larder.core.errors import LarderError
from larder.store.blobs.blob_store import BlobRef
from larder.store.blobs.container import unpack_container
from larder.store.blobs.tenant_blobs import GRACE_SECONDS
from larder.store.components import StoreComponents
from larder.store.fs.base import QUARANTINE_FOLDER
from larder.store.sessions.records import Record, SessionKey, decode_record, encode_record

# Lifetime of the tombstone of a removed session, for writers that do not know of the removal.
TOMBSTONE_SECONDS = 60.0


@dataclass(frozen=True)
class VerificationResult:
    """Verification result of one session.

    Args:
        record: its newest state.
        problems: one sentence each; empty where everything is whole.
    """

    record: Record
    problems: tuple[str, ...]


class StoreMaintenance:
    """Maintenance operations of a store. Safe while others use it."""

    def __init__(self, parts: StoreComponents) -> None:
        self._parts = parts

    def verify(self, records: Iterable[Record]) -> list[VerificationResult]:
        """Read every blob of some sessions and verify its digest.

        What is damaged is set aside, so that the next saving writes it anew. A record that is
        missing or damaged beside the blobs is written again.
        """
        return [VerificationResult(record, tuple(self._problems(record))) for record in records]

    def sweep(self, grace_seconds: float = GRACE_SECONDS) -> int:
        """Delete everything unreferenced: leftovers of crashes and of removed sessions.

        Args:
            grace_seconds: how long what another process writes may be in the making.

        Returns:
            the bytes of blobs that were freed.
        """
        parts = self._parts
        for key, newest in _newest_records(parts.epochs.all_records()).items():
            keep = 1 if self._is_over(newest) else parts.kept_epochs
            parts.garbage.states(parts.epochs.prune(key, keep))
        written = parts.epochs.all_records()
        self._sync_removed({record.key for record in written})
        live = {ref.digest for record in written for ref in record.refs}
        before = parts.clock() - grace_seconds
        live |= parts.garbage.sweep(live, before)
        existing = [record for record in written if not record.removed]
        parts.branches.sweep({record.key for record in existing}, before)
        parts.branches.note_all(existing)
        live |= {chunk.ref.digest for _, chunk, *_ in parts.chunks.all()}
        for record in _newest_records(written).values():
            if record.removed and record.made <= before:
                parts.epochs.forget(record)
        for path in parts.executor.call(self._quarantined, before):
            parts.executor.call(parts.place.remove, path)
        return parts.blobs.sweep(live, grace_seconds)

    def note_branches(self) -> None:
        """Write branch notes for branches that predate them and are in the index."""
        parts = self._parts
        tenants = {tenant for tenant, _ in parts.manifest.sessions()}
        parts.branches.note_all(
            record for tenant in tenants for record in parts.epochs.indexed_heads(tenant)
        )

    def forget_removed(self, grace_seconds: float = TOMBSTONE_SECONDS) -> int:
        """Delete tombstones of removed sessions; return their number. Cheap, unlike a sweep."""
        parts = self._parts
        gone = parts.manifest.removed(parts.clock() - grace_seconds)
        for record in gone:
            parts.epochs.forget(record)
        parts.blobs.settle()
        return len(gone)

    def _sync_removed(self, written: Collection[SessionKey]) -> None:
        """Index sessions that another machine has removed."""
        for key in self._parts.manifest.sessions():
            if key not in written:
                with suppress(LarderError):
                    self._parts.epochs.newest(key)

    def _is_over(self, newest: Record) -> bool:
        """True if a session was removed; states left by an interrupted removal are deleted."""
        if not newest.removed:
            return False
        return newest.epoch == max(self._parts.epochs.written(newest.key), default=0)

    def _problems(self, record: Record) -> list[str]:
        own = record.tenant
        found = [said for ref in record.spans if (said := self._damage(ref, own))]
        try:
            self._parts.reader.ids(record)
        except LarderError as error:
            found.append(f"The log of tokens is lost: {error}")
        if record.transcript is not None:
            try:
                self._parts.reader.transcript(record)
            except LarderError as error:
                found.append(f"The transcript is lost: {error}")
        try:
            self._parts.reader.beside(record)
        except LarderError as error:
            found.append(f"The state beside the caches is lost: {error}")
        return found + self._repair_record(record)

    def _damage(self, ref: BlobRef, tenant: str) -> str:
        try:
            unpack_container(self._parts.blobs.get(ref, tenant))
        except LarderError as error:
            return str(error)
        return ""

    def _repair_record(self, record: Record) -> list[str]:
        parts = self._parts
        try:
            data = parts.executor.call(parts.records.read, record.path)
            if decode_record(data, parts.secret) == record:
                return []
        except (FileNotFoundError, LarderError):
            pass
        parts.executor.call(parts.records.replace, record.path, encode_record(record, parts.secret))
        return ["Its record beside the blobs was damaged and is written again."]

    def _quarantined(self, before: float) -> list[str]:
        return [
            e.path for e in self._parts.place.list_files(QUARANTINE_FOLDER) if e.modified <= before
        ]


def _newest_records(written: Iterable[Record]) -> dict[SessionKey, Record]:
    """Newest record of each session."""
    return {record.key: record for record in sorted(written, key=lambda record: record.epoch)}
