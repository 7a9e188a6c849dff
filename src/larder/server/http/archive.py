"""SQLite archive of stored responses, conversations and idempotent answers, per tenant."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from larder.core.errors import Damaged, StoreError, StoreFull
from larder.server.http.archive_rows import (
    CHECK_TENANT,
    CONVERSATION,
    ITEM,
    KEY_CHECK,
    TABLE,
    ArchiveRows,
    check_version,
)
from larder.server.request import ApiError, ChatMessage
from larder.store.encryption import Encryption, NoEncryption
from larder.store.sqlite import DATABASE_SUFFIXES, begin_log, make_private

__all__ = ["IDEMPOTENT_ANSWER", "CONVERSATION", "RESPONSE", "Archive", "ConversationItem"]

RESPONSE = "response"
IDEMPOTENT_ANSWER = "answered"  # the answer to a request with an idempotency key
EVICTABLE_KINDS = (RESPONSE, IDEMPOTENT_ANSWER)  # removed when the archive is full, oldest first
SELECT_ORDERED = (
    "SELECT tenant, kind, id, parent, made, body FROM documents "
    "ORDER BY tenant, kind, parent, place, made, rowid"
)


@dataclass(frozen=True)
class ConversationItem:
    """One message of a conversation."""

    id: str
    turn: ChatMessage


class Archive:
    """JSON documents of tenants in one SQLite file. Thread-safe.

    A document is visible to its own tenant only. Writes are durable when the method, or the
    enclosing `together` block, returns. When the responses and idempotent answers of a tenant
    exceed `limit_bytes`, the oldest are removed; conversations stay until they are deleted.

    Args:
        path: SQLite file; None keeps everything in memory.
        limit_bytes: capacity for responses and idempotent answers, per tenant.
        sealing: encryption of documents; fixed when the archive is created.

    Raises:
        Damaged: the file is not an archive.
        StoreError: the archive is encrypted with another key, is encrypted and no key is given,
            or is not encrypted and a key is given.
    """

    def __init__(
        self,
        path: Path | None = None,
        limit_bytes: int = 256 << 20,
        sealing: Encryption = NoEncryption(),  # noqa: B008, without state
    ) -> None:
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private(path)
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
        self._base = sqlite3.connect(
            ":memory:" if path is None else path, timeout=30, check_same_thread=False
        )
        self._rows = ArchiveRows(self._base, sealing)
        try:
            begin_log(self._base)
            check_version(self._base, path)
            self._base.executescript(TABLE)
            with self._base:
                self._rows.check()
        except StoreError:
            self._base.close()
            raise
        except sqlite3.DatabaseError as error:
            self._base.close()
            raise Damaged(f"{path} is no archive of responses ({error}): move it away.") from error

    def get(self, tenant: str, kind: str, name: str) -> dict[str, Any] | None:
        """Document of a tenant by kind and name, or None.

        Raises:
            Damaged: the document was altered.
        """
        with self._using():
            return self._rows.get(tenant, kind, name)

    def put(
        self, tenant: str, kind: str, name: str, body: dict[str, Any], created: float | None = None
    ) -> None:
        """Insert or replace a document.

        Args:
            created: creation time in seconds since 1970; None for now.
        """
        with self._using():
            self._rows.put(tenant, kind, name, body, created)
            self._shrink(tenant)

    def remove(self, tenant: str, kind: str, name: str) -> bool:
        """Delete a document and its items; True if it existed."""
        with self._using():
            return self._rows.remove(tenant, kind, name)

    def items(self, tenant: str, conversation: str) -> tuple[ConversationItem, ...]:
        """Messages of a conversation in order.

        Raises:
            Damaged: messages were altered.
        """
        with self._using():
            body = self._rows.items(tenant, conversation)
        return tuple(ConversationItem(name, ChatMessage(**turn)) for name, turn in body)

    def append(
        self,
        tenant: str,
        conversation: str,
        items: Sequence[ConversationItem],
        expected: int | None = None,
        created: float | None = None,
    ) -> None:
        """Append messages to a conversation, all of them or none.

        Args:
            expected: required number of messages before the call; None for any.
            created: creation time in seconds since 1970; None for now.

        Raises:
            ApiError: 409 `conversation_changed`.
            Damaged: earlier messages were altered.
        """
        body = [(item.id, {"role": item.turn.role, "text": item.turn.text}) for item in items]
        with self._using():
            if expected not in (None, self._rows.count(tenant, conversation)):
                message = "The conversation changed while it was being answered: retry."
                raise ApiError(message, 409, "conversation_changed", "conversation", 1.0)
            self._rows.append(tenant, conversation, body, created)

    def remove_item(self, tenant: str, conversation: str, name: str) -> None:
        """Delete one message of a conversation, if it exists."""
        with self._using():
            self._rows.remove_item(tenant, conversation, name)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Transaction around all reads and writes of this thread inside the block.

        An exception, or the end of the process, inside the block rolls everything back.
        """
        with self._using():
            self._base.execute("BEGIN IMMEDIATE")
            yield

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._base.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Context of reads and writes: a transaction, unless `together` has opened one."""
        try:
            with self._lock:
                if self._base.in_transaction:  # opened by `together`, which commits it
                    yield
                    return
                with self._base:
                    yield
        except sqlite3.OperationalError as error:
            raise StoreFull(f"The archive of responses cannot be used ({error}).") from error
        except sqlite3.DatabaseError as error:
            raise Damaged(f"The archive is damaged ({error}): move it away.") from error

    def _shrink(self, tenant: str) -> None:
        where = "WHERE tenant = ? AND kind IN (?, ?)"
        parameters = self._rows.owner(tenant), *EVICTABLE_KINDS
        (used_bytes,) = self._base.execute(
            f"SELECT coalesce(sum(bytes), 0) FROM documents {where}", parameters
        ).fetchone()
        while used_bytes > self._limit_bytes:
            row, size = self._base.execute(
                f"SELECT rowid, bytes FROM documents {where} ORDER BY made, rowid LIMIT 1",
                parameters,
            ).fetchone()
            self._base.execute("DELETE FROM documents WHERE rowid = ?", (row,))
            used_bytes -= size


def seal_archive(path: Path, sealing: Encryption) -> int:
    """Encrypt an existing archive into a new file that atomically replaces the old one.

    Ownership and order of the documents are trusted as they stand: anyone who could write the old
    file may have forged them. After an interruption the old archive is unchanged.

    Returns:
        Number of sealed documents; 0 if there is no archive or it is encrypted already.

    Raises:
        StoreError: another process uses the archive.
        Damaged: the file is not an archive, or a document does not open with this key.
    """
    if not path.exists():
        return 0
    created = path.with_name(f"{path.name}.sealing")
    _remove(created)
    try:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as old:
            old.execute("PRAGMA journal_mode=DELETE")  # needs exclusive access to the file
            old.execute("BEGIN EXCLUSIVE")
            query = "SELECT 1 FROM documents WHERE tenant = ? AND kind = ?"
            if old.execute(query, (CHECK_TENANT, KEY_CHECK)).fetchone():
                return 0
            count = _copied(old, created, sealing)
            os.replace(created, path)
    except sqlite3.OperationalError as error:
        raise StoreError(
            f"{path} cannot be sealed ({error}): stop the server that uses it first."
        ) from error
    except sqlite3.DatabaseError as error:
        raise Damaged(f"{path} is no archive of responses ({error}): move it away.") from error
    finally:
        _remove(created)
    return count


def _copied(old: sqlite3.Connection, path: Path, sealing: Encryption) -> int:
    count = 0
    with closing(Archive(path, limit_bytes=1 << 62, sealing=sealing)) as archive:
        with archive.together():
            for tenant, kind, name, parent, created, body in old.execute(SELECT_ORDERED):
                if isinstance(body, bytes):  # sealed by Larder 0.1
                    body = sealing.decrypt(tenant, body, f"{kind}/{name}")
                body = json.loads(body)
                if kind == ITEM:
                    archive.append(
                        tenant,
                        parent,
                        [ConversationItem(name, ChatMessage(**body))],
                        created=created,
                    )
                else:
                    archive.put(tenant, kind, name, body, created)
                count += 1
    return count


def _remove(path: Path) -> None:
    for suffix in DATABASE_SUFFIXES:
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
