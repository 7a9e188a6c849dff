"""What clients may ask for again by an id of ours: responses, conversations and their items."""

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
)
from larder.server.request import ApiError, ChatMessage
from larder.store.encryption import Encryption, NoEncryption
from larder.store.sqlite import DATABASE_SUFFIXES, make_private

__all__ = ["IDEMPOTENT_ANSWER", "CONVERSATION", "RESPONSE", "Archive", "ConversationItem"]

RESPONSE = "response"
IDEMPOTENT_ANSWER = "answered"  # what was answered to a request with an idempotency key
EVICTABLE_KINDS = (RESPONSE, IDEMPOTENT_ANSWER)  # kinds that make room


@dataclass(frozen=True)
class ConversationItem:
    """One message of a conversation."""

    id: str
    turn: ChatMessage


class Archive:
    """JSON documents of tenants, in one SQLite file. Safe from threads.

    Every document belongs to a tenant, and is as unknown to others as one that never was. What is
    written is on the disk when the method returns, or the block of `together`. Responses and what
    was answered to idempotency keys leave, the oldest first, when a tenant's take more than
    `limit_bytes`; conversations stay until they are deleted.

    Args:
        path: of the file; None keeps everything in memory.
        limit_bytes: of responses and of what was answered to keys, per tenant.
        sealing: how documents are hidden; an archive is begun under a key or without.

    Raises:
        Damaged: the file is something else.
        StoreError: it is under another key, or under one and none is given, or the other way round.
    """

    def __init__(
        self,
        path: Path | None = None,
        limit_bytes: int = 256 << 20,
        sealing: Encryption = NoEncryption(),  # noqa: B008, without state
    ) -> None:
        self._rows = ArchiveRows(sealing)
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private(path)
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
        self._base = sqlite3.connect(
            ":memory:" if path is None else path, timeout=30, check_same_thread=False
        )
        try:
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.executescript(TABLE)
            with self._base:
                self._rows.check(self._base)
        except StoreError:
            self._base.close()
            raise
        except sqlite3.DatabaseError as error:
            self._base.close()
            raise Damaged(f"{path} is no archive of responses ({error}): move it away.") from error

    def get(self, tenant: str, kind: str, name: str) -> dict[str, Any] | None:
        """A document; None if this tenant has none of that name.

        Raises:
            Damaged: it is not what was written.
        """
        with self._using() as base:
            return self._rows.get(base, tenant, kind, name)

    def put(
        self, tenant: str, kind: str, name: str, body: dict[str, Any], made: float | None = None
    ) -> None:
        """Write a document, or write it anew.

        Args:
            made: seconds since 1970; None for now.
        """
        with self._using() as base:
            self._rows.put(base, tenant, kind, name, body, made)
            self._shrink(base, tenant)

    def remove(self, tenant: str, kind: str, name: str) -> bool:
        """Delete a document and the items in it; whether it was there."""
        with self._using() as base:
            return self._rows.remove(base, tenant, kind, name)

    def items(self, tenant: str, conversation: str) -> tuple[ConversationItem, ...]:
        """The messages of a conversation in order.

        Raises:
            Damaged: they are not what was written.
        """
        with self._using() as base:
            told = self._rows.items(base, tenant, conversation)
        return tuple(ConversationItem(name, ChatMessage(**turn)) for name, turn in told)

    def append(
        self,
        tenant: str,
        conversation: str,
        items: Sequence[ConversationItem],
        expected: int | None = None,
        made: float | None = None,
    ) -> None:
        """Add messages at the end, all of them or none.

        Args:
            expected: how many there must be before; None for any number.
            made: as `put`.

        Raises:
            Refusal: 409 `conversation_changed`.
            Damaged: those before are not what was written.
        """
        told = [(item.id, {"role": item.turn.role, "text": item.turn.text}) for item in items]
        with self._using() as base:
            if expected not in (None, self._rows.count(base, tenant, conversation)):
                said = "The conversation has changed while it was answered: ask again."
                raise ApiError(said, 409, "conversation_changed", "conversation", 1.0)
            self._rows.append(base, tenant, conversation, told, made)

    def remove_item(self, tenant: str, conversation: str, name: str) -> None:
        """Take one message out, if it is there."""
        with self._using() as base:
            self._rows.remove_item(base, tenant, conversation, name)

    @contextmanager
    def together(self) -> Iterator[None]:
        """One transaction of all that this thread reads and writes meanwhile.

        If the block is left by an error, or the process ends in it, nothing of it was written.
        """
        with self._using() as base:
            base.execute("BEGIN IMMEDIATE")
            yield

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._base.close()

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                if self._base.in_transaction:  # begun by `together`, which ends it
                    yield self._base
                    return
                with self._base:
                    yield self._base
        except sqlite3.OperationalError as error:
            raise StoreFull(f"The archive of responses cannot be used ({error}).") from error
        except sqlite3.DatabaseError as error:
            raise Damaged(f"The archive is damaged ({error}): move it away.") from error

    def _shrink(self, base: sqlite3.Connection, tenant: str) -> None:
        where, own = (
            "WHERE tenant = ? AND kind IN (?, ?)",
            (self._rows.owner(tenant), *EVICTABLE_KINDS),
        )
        (held,) = base.execute(
            f"SELECT coalesce(sum(bytes), 0) FROM documents {where}", own
        ).fetchone()
        while held > self._limit_bytes:
            row, size = base.execute(
                f"SELECT rowid, bytes FROM documents {where} ORDER BY made, rowid LIMIT 1", own
            ).fetchone()
            base.execute("DELETE FROM documents WHERE rowid = ?", (row,))
            held -= size


SELECT_ORDERED = (
    "SELECT tenant, kind, id, parent, made, body FROM documents "
    "ORDER BY tenant, kind, parent, place, made, rowid"
)


def seal_archive(path: Path, sealing: Encryption) -> int:
    """Seal an archive as it stands, in a new file that takes the place of the old one.

    Whose documents they are, and in which order, is believed: whoever could write the old file may
    have written them. If this is interrupted, the old archive is there as it was.

    Returns:
        how many documents were sealed; 0 where there is no archive, or it is under a key.

    Raises:
        StoreError: somebody uses it.
        Damaged: it is no archive, or a document of it does not open with this key.
    """
    if not path.exists():
        return 0
    made = path.with_name(f"{path.name}.sealing")
    _remove(made)
    try:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as old:
            old.execute("PRAGMA journal_mode=DELETE")  # which needs the file for itself
            old.execute("BEGIN EXCLUSIVE")
            asked = "SELECT 1 FROM documents WHERE tenant = ? AND kind = ?"
            if old.execute(asked, (CHECK_TENANT, KEY_CHECK)).fetchone():
                return 0
            count = _copied(old, made, sealing)
            os.replace(made, path)
    except sqlite3.OperationalError as error:
        raise StoreError(
            f"{path} cannot be sealed ({error}): stop the server that uses it first."
        ) from error
    except sqlite3.DatabaseError as error:
        raise Damaged(f"{path} is no archive of responses ({error}): move it away.") from error
    finally:
        _remove(made)
    return count


def _copied(old: sqlite3.Connection, path: Path, sealing: Encryption) -> int:
    count = 0
    with closing(Archive(path, limit_bytes=1 << 62, sealing=sealing)) as archive:
        with archive.together():
            for tenant, kind, name, parent, made, body in old.execute(SELECT_ORDERED):
                if isinstance(body, bytes):  # as Larder 0.1 has sealed it
                    body = sealing.opened(tenant, body, f"{kind}/{name}")
                told = json.loads(body)
                if kind == ITEM:
                    archive.append(
                        tenant, parent, [ConversationItem(name, ChatMessage(**told))], made=made
                    )
                else:
                    archive.put(tenant, kind, name, told, made)
                count += 1
    return count


def _remove(path: Path) -> None:
    for suffix in DATABASE_SUFFIXES:
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
