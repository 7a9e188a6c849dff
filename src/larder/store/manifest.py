"""Manifest of a store on one machine: a SQLite index that can be rebuilt.

Heads of sessions move by compare-and-swap. Records in the database are sealed, so that damage is
noticed. All of its content is in the records beside the blobs as well: a damaged or foreign
database is moved aside and rebuilt, not repaired.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from larder.core.errors import Damaged, Refused, StoreSlow, Superseded
from larder.store.encryption import Encryption, NoEncryption
from larder.store.fs.deadline import CallLimits, CircuitBreaker
from larder.store.sessions.records import Record, SessionKey, decode_record, encode_record
from larder.store.sqlite import (
    BUSY_SECONDS,
    is_index_complete,
    make_private,
    mark_index_complete,
    prepare_schema,
    translate_errors,
)

LOG_BYTES = 320 * 1024  # largest size of the write-ahead log, checkpoints included
# Of waits for the lock of the file.
DEFAULT_LIMITS = CallLimits(BUSY_SECONDS, max_failures=1, rest_seconds=BUSY_SECONDS)
MANIFEST_CONTEXT = "manifest"  # in place of a path, for the encryption of records


class Manifest:
    """Index of sessions, their epochs, and the blobs they refer to.

    Safe from threads and from processes of one machine. Changes are atomic.

    Raises:
        Damaged: the file is no intact manifest: see `quarantine_database`.
        StoreFull, StoreSlow: it cannot be written, or is locked.
    """

    def __init__(
        self,
        path: Path,
        secret: bytes,
        clock: Callable[[], float] = time.time,
        encryption: Encryption = NoEncryption(),  # noqa: B008, without state
        call_limits: CallLimits = DEFAULT_LIMITS,
    ) -> None:
        self.path, self.clock, self._call_limits = path, clock, call_limits
        self._breaker = CircuitBreaker(call_limits)
        self._secret, self._encryption = secret, encryption
        self._lock = threading.RLock()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(path)
        with translate_errors(path):
            self._database = sqlite3.connect(
                path, timeout=call_limits.seconds, isolation_level=None, check_same_thread=False
            )
            try:
                prepare_schema(self._database, path)
            except BaseException:
                self._database.close()
                raise

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    @property
    def is_built(self) -> bool:
        """True if everything beside the blobs has been indexed once."""
        with self.reading() as rows:
            return is_index_complete(rows)

    def mark_built(self) -> None:
        """Mark the index as complete."""
        with self.writing() as rows:
            mark_index_complete(rows)

    def head(self, key: SessionKey) -> Record | None:
        """Newest state of a session; None if there is none.

        Raises:
            Damaged: the row is not as it was written.
        """
        with self.reading() as rows:
            found = rows(
                "SELECT record, head FROM sessions LEFT JOIN epochs ON epochs.tenant = "
                "sessions.tenant AND epochs.session = sessions.session AND epoch = head "
                "WHERE sessions.tenant = ? AND sessions.session = ?",
                key,
            )
        return self._record(found[0][0], key, found[0][1]) if found else None

    def epoch(self, key: SessionKey, epoch: int) -> Record | None:
        """Earlier state of a session, if it is retained."""
        with self.reading() as rows:
            found = rows(
                "SELECT record FROM epochs WHERE tenant = ? AND session = ? AND epoch = ?",
                (*key, epoch),
            )
        return self._record(found[0][0], key, epoch) if found else None

    def commit(self, record: Record, expected: int) -> None:
        """Make a record the head of its session by compare-and-swap.

        Args:
            expected: the epoch that is the head now; 0 for a new session.

        Raises:
            Superseded: another epoch is the head; nothing has changed.
        """
        with self.writing() as rows:
            found = rows("SELECT head FROM sessions WHERE tenant = ? AND session = ?", record.key)
            head = found[0][0] if found else expected  # a new session may begin at any epoch
            if head != expected:
                raise superseded_error(record.name, expected, head)
            self._insert(rows, record)
            rows(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, 1) ON CONFLICT DO UPDATE "
                "SET head = excluded.head, last_used = excluded.last_used, uses = uses + 1",
                (*record.key, record.epoch, self.clock()),
            )

    def adopt(self, record: Record) -> None:
        """Index a state found beside the blobs; it becomes the head if it is the newest."""
        with self.writing() as rows:
            self._insert(rows, record)
            rows(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, 0) ON CONFLICT DO UPDATE "
                "SET head = max(head, excluded.head)",
                (*record.key, record.epoch, record.made),
            )

    def roll_back_head(self, key: SessionKey, epoch: int) -> None:
        """Make an earlier state the head after later states were lost."""
        with self.writing() as rows:
            for table in ("epochs", "spans"):
                rows(
                    f"DELETE FROM {table} WHERE tenant = ? AND session = ? AND epoch > ?",
                    (*key, epoch),
                )
            rows("UPDATE sessions SET head = ? WHERE tenant = ? AND session = ?", (epoch, *key))

    def forget(self, key: SessionKey, epochs: list[int]) -> None:
        """Remove states; the caller deletes blobs that are then unreferenced."""
        with self.writing() as rows:
            for epoch in epochs:
                for table in ("epochs", "spans"):
                    rows(
                        f"DELETE FROM {table} WHERE tenant = ? AND session = ? AND epoch = ?",
                        (*key, epoch),
                    )

    def forget_session(self, key: SessionKey) -> None:
        """Remove every row of a session."""
        with self.writing() as rows:
            for table in ("epochs", "spans", "sessions"):
                rows(f"DELETE FROM {table} WHERE tenant = ? AND session = ?", key)

    def epochs(self, key: SessionKey) -> list[int]:
        """Retained epochs of a session, oldest first."""
        with self.reading() as rows:
            found = rows(
                "SELECT epoch FROM epochs WHERE tenant = ? AND session = ? ORDER BY epoch", key
            )
        return [epoch for (epoch,) in found]

    def sessions(self) -> list[SessionKey]:
        """Keys of all sessions, most recently used first."""
        with self.reading() as rows:
            found = rows("SELECT tenant, session FROM sessions ORDER BY last_used DESC, session")
        return [SessionKey(tenant, session) for tenant, session in found]

    def heads_of(self, tenant: str) -> dict[SessionKey, Record | None]:
        """Newest state of each session of a tenant, most recently used first; None if damaged."""
        with self.reading() as rows:
            found = rows(
                "SELECT sessions.session, head, record FROM sessions LEFT JOIN epochs ON "
                "epochs.tenant = sessions.tenant AND epochs.session = sessions.session "
                "AND epoch = head WHERE sessions.tenant = ? "
                "ORDER BY last_used DESC, sessions.session",
                (tenant,),
            )
        records = dict[SessionKey, Record | None]()
        for session, head, data in found:
            key = SessionKey(tenant, session)
            records[key] = None
            with suppress(Damaged, Refused):
                records[key] = self._record(data, key, head)
        return records

    def heads(self) -> dict[SessionKey, int]:
        """Newest epoch of every session."""
        with self.reading() as rows:
            found = rows("SELECT tenant, session, head FROM sessions")
        return {SessionKey(tenant, session): head for tenant, session, head in found}

    def removed(self, before: float) -> list[Record]:
        """Tombstones of sessions that were not read since a time."""
        with self.reading() as rows:
            found = rows(
                "SELECT tenant, session, head, record FROM sessions JOIN epochs "
                "USING (tenant, session) WHERE epoch = head AND last_used <= ? AND NOT EXISTS "
                "(SELECT 1 FROM spans WHERE spans.tenant = sessions.tenant "
                "AND spans.session = sessions.session)",  # only they need no blob
                (before,),
            )
        records = list[Record]()
        for tenant, session, head, data in found:
            with suppress(Damaged, Refused):
                records.append(self._record(data, SessionKey(tenant, session), head))
        return [record for record in records if record.removed]

    def used(self, key: SessionKey) -> None:
        """Record a read of a session."""
        with self.writing() as rows:
            rows(
                "UPDATE sessions SET last_used = ?, uses = uses + 1 "
                "WHERE tenant = ? AND session = ?",
                (self.clock(), *key),
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the database and its write-ahead log, counted at its full size."""
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        database, log = (file.stat().st_size if file.exists() else 0 for file in files)
        return database + max(log, LOG_BYTES)

    @contextmanager
    def reading(self) -> Iterator[Callable[..., list[Any]]]:
        """Context of a read transaction: a function that runs SQL."""
        with self._held():
            yield lambda text, given=(): self._database.execute(text, given).fetchall()

    @contextmanager
    def writing(self) -> Iterator[Callable[..., list[Any]]]:
        """Context of an atomic write transaction: a function that runs SQL."""
        with self._held():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield lambda text, given=(): self._database.execute(text, given).fetchall()
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Context that holds the database in this thread; fails fast after a recent timeout.

        Raises:
            StoreSlow: it is locked, or was a short time ago.
        """
        if self._breaker.is_open:
            raise StoreSlow(f"{self.path} was locked too long and is not retried for a while.")
        if not self._lock.acquire(timeout=self._call_limits.seconds):
            self._breaker.failed()
            raise StoreSlow(f"{self.path} was locked for {self._call_limits.seconds:g} s.")
        try:
            with translate_errors(self.path, self._call_limits.seconds):
                yield
            self._breaker.record_success()
        except StoreSlow:
            self._breaker.failed()
            raise
        finally:
            self._lock.release()

    def _insert(self, rows: Callable[..., list[Any]], record: Record) -> None:
        data = encode_record(record, self._secret)
        data = self._encryption.encrypt(record.tenant, data, MANIFEST_CONTEXT)
        rows("INSERT OR REPLACE INTO epochs VALUES (?, ?, ?, ?)", (*record.key, record.epoch, data))
        for ref in record.refs:
            rows(
                "INSERT OR IGNORE INTO spans VALUES (?, ?, ?, ?)",
                (ref.digest, *record.key, record.epoch),
            )

    def _record(self, data: bytes | None, key: SessionKey, epoch: int) -> Record:
        if data is None:
            raise Damaged(f"The manifest lacks epoch {epoch} of a session.")
        decrypted = self._encryption.decrypt(key.tenant, bytes(data), MANIFEST_CONTEXT)
        record = decode_record(decrypted, self._secret)
        if (record.key, record.epoch) != (key, epoch):
            raise Damaged("The manifest has another session's record in the place of this one's.")
        return record


def superseded_error(name: str, expected: int, head: int) -> Superseded:
    """Error for a writer whose expected epoch is no longer the head."""
    return Superseded(
        f"Session {name!r} is at epoch {head}, not {expected} any more: load it again, and repeat "
        "what was to be saved."
    )
