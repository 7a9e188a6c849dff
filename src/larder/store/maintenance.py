"""Maintenance of a store: verification, sweep, and removal of tombstones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from larder.core.errors import LarderError, Refused
from larder.store.blobs.container import unpack_container
from larder.store.blobs.tenant_blobs import GRACE_SECONDS
from larder.store.components import StoreComponents
from larder.store.fs.base import QUARANTINE_FOLDER
from larder.store.sessions.records import Record, SessionKey, decode_record, encode_record

# Lifetime of a tombstone, for writers that do not know of the removal.
TOMBSTONE_SECONDS = 60.0


@dataclass(frozen=True)
class VerificationResult:
    """Verification result of one session.

    Args:
        record: newest state of the session.
        problems: one sentence each; empty if all data is intact.
    """

    record: Record
    problems: tuple[str, ...]


@dataclass(frozen=True)
class UpgradeResult:
    """Outcome of an upgrade of a store.

    Args:
        records: number of session records that were carried over.
        chunks: number of chunk records that were.
        refused: why session records were left as they are, by their path in the store.
    """

    records: int
    chunks: int
    refused: Mapping[str, str]


class StoreMaintenance:
    """Maintenance operations of a store. Safe while others use it."""

    def __init__(self, parts: StoreComponents) -> None:
        self._parts = parts

    def verify(self, records: Iterable[Record]) -> list[VerificationResult]:
        """Read every blob of some sessions and verify its digest.

        A damaged blob is moved to quarantine, so that the next save writes it again. A record that
        is missing or damaged beside the blobs is written again.
        """
        return [VerificationResult(record, tuple(self._problems(record))) for record in records]

    def refused_records(self) -> dict[str, str]:
        """Refusals of records that another version wrote, by their path in the store."""
        return self._parts.epochs.all_records()[1]

    def upgrade(self) -> UpgradeResult:
        """Carry over what earlier versions have written.

        Each record is replaced at once: what an interrupted upgrade has not reached is as it was,
        and the next one continues.
        """
        records, refused = self._parts.epochs.upgrade()
        return UpgradeResult(records, self._parts.chunks.upgrade(), refused)

    def sweep(self, grace_seconds: float = GRACE_SECONDS) -> int:
        """Delete everything unreferenced: leftovers of crashes and of removed sessions.

        Nothing is deleted while there are records of other versions, which tell of their blobs to
        these alone.

        Args:
            grace_seconds: age up to which unreferenced data may be part of a save in progress.

        Returns:
            bytes of the deleted blobs.
        """
        parts = self._parts
        written, refused = parts.epochs.all_records()
        if refused:
            return 0
        for key, newest in _newest_records(written).items():
            keep = 1 if self._is_over(newest) else parts.kept_epochs
            parts.garbage.states(parts.epochs.prune(key, keep))
        written, _ = parts.epochs.all_records()
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
            parts.executor.call(parts.file_system.remove, path)
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
        removed = parts.manifest.removed(parts.clock() - grace_seconds)
        for record in removed:
            parts.epochs.forget(record)
        parts.blobs.settle()
        return len(removed)

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
        reader = self._parts.reader
        checks: list[tuple[str, Callable[[], object]]] = [
            ("", lambda ref=ref: unpack_container(self._parts.blobs.get(ref, record.tenant)))
            for ref in record.spans
        ]
        checks.append(("The log of tokens is lost: ", lambda: reader.ids(record)))
        if record.transcript is not None:
            checks.append(("The transcript is lost: ", lambda: reader.transcript(record)))
        checks.append(("The state beside the caches is lost: ", lambda: reader.extra_state(record)))
        problems = list[str]()
        for what, check in checks:
            try:
                check()
            except LarderError as error:
                problems.append(f"{what}{error}")
        return problems + self._repair_record(record)

    def _repair_record(self, record: Record) -> list[str]:
        parts = self._parts
        try:
            data = parts.executor.call(parts.records.read, record.path)
            if decode_record(data, parts.secret) == record:
                return []
        except Refused as error:  # of another version, which wrote it after the index was filled
            return [str(error)]
        except (FileNotFoundError, LarderError):
            pass
        parts.executor.call(parts.records.replace, record.path, encode_record(record, parts.secret))
        return ["Its record beside the blobs was damaged and is written again."]

    def _quarantined(self, before: float) -> list[str]:
        return [
            e.path
            for e in self._parts.file_system.list_files(QUARANTINE_FOLDER)
            if e.modified <= before
        ]


def _newest_records(written: Iterable[Record]) -> dict[SessionKey, Record]:
    """Newest record of each session."""
    return {record.key: record for record in sorted(written, key=lambda record: record.epoch)}
