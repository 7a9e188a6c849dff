"""What clients may ask for again by an id of ours: responses, conversations and their items."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from larder.core.errors import Damaged, StoreFull
from larder.server.request import Refusal, Turn
from larder.store.sealing import Sealing, Unsealed

TABLE = """
CREATE TABLE IF NOT EXISTS documents (
    tenant TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL, parent TEXT NOT NULL,
    place INTEGER NOT NULL, made REAL NOT NULL, bytes INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (tenant, kind, id)
);
CREATE INDEX IF NOT EXISTS by_parent ON documents (tenant, kind, parent, place);
CREATE INDEX IF NOT EXISTS by_age ON documents (tenant, kind, made);
"""
RESPONSE, CONVERSATION, ITEM = "response", "conversation", "item"
ANSWERED = "answered"  # what was answered to a request with an idempotency key
LEAVING = (RESPONSE, ANSWERED)  # kinds that make room


@dataclass(frozen=True)
class Item:
    """One message of a conversation."""

    id: str
    turn: Turn


class Archive:
    """JSON documents of tenants, in one SQLite file. Safe from threads.

    Every document belongs to a tenant, and is as unknown to others as one that never was. What is
    written is on the disk when the method returns, or the block of `together`. Responses and what
    was answered to idempotency keys leave, the oldest first, when a tenant's take more than
    `limit_bytes`; conversations stay until they are deleted.

    Args:
        path: of the file; None keeps everything in memory.
        limit_bytes: of responses and of what was answered to keys, per tenant.
        sealing: how documents are hidden; those that were written open are still read.

    Raises:
        Damaged: the file is something else.
    """

    def __init__(
        self,
        path: Path | None = None,
        limit_bytes: int = 256 << 20,
        sealing: Sealing = Unsealed(),  # noqa: B008, without state
    ) -> None:
        self._sealing = sealing
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
        self._base = sqlite3.connect(
            ":memory:" if path is None else path, timeout=30, check_same_thread=False
        )
        try:
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.executescript(TABLE)
        except sqlite3.DatabaseError as error:
            self._base.close()
            raise Damaged(f"{path} is no archive of responses ({error}): move it away.") from error

    def get(self, tenant: str, kind: str, name: str) -> dict[str, Any] | None:
        """A document; None if this tenant has none of that name."""
        with self._using() as base:
            row = base.execute(
                "SELECT body FROM documents WHERE tenant = ? AND kind = ? AND id = ?",
                (tenant, kind, name),
            ).fetchone()
        return None if row is None else self._opened((tenant, kind, name), row[0])

    def put(self, tenant: str, kind: str, name: str, body: dict[str, Any]) -> None:
        """Write a document, or write it anew."""
        with self._using() as base:
            self._insert(base, (tenant, kind, name, "", 0), body)
            self._shrink(base, tenant)

    def remove(self, tenant: str, kind: str, name: str) -> bool:
        """Delete a document and the items in it; whether it was there."""
        with self._using() as base:
            base.execute(
                "DELETE FROM documents WHERE tenant = ? AND kind = ? AND parent = ?",
                (tenant, ITEM, name),
            )
            gone = base.execute(
                "DELETE FROM documents WHERE tenant = ? AND kind = ? AND id = ?",
                (tenant, kind, name),
            )
            return gone.rowcount > 0

    def items(self, tenant: str, conversation: str) -> tuple[Item, ...]:
        """The messages of a conversation in order."""
        with self._using() as base:
            rows = base.execute(
                "SELECT id, body FROM documents WHERE tenant = ? AND kind = ? AND parent = ? "
                "ORDER BY place",
                (tenant, ITEM, conversation),
            ).fetchall()
        told = [(name, self._opened((tenant, ITEM, name), body)) for name, body in rows]
        return tuple(Item(name, Turn(**turn)) for name, turn in told)

    def append(
        self, tenant: str, conversation: str, items: Sequence[Item], expected: int | None = None
    ) -> None:
        """Add messages at the end, all of them or none.

        Args:
            expected: how many there must be before; None for any number.

        Raises:
            Refusal: 409 `conversation_changed`.
        """
        with self._using() as base:
            start, held = base.execute(
                "SELECT coalesce(max(place) + 1, 0), count(*) FROM documents "
                "WHERE tenant = ? AND kind = ? AND parent = ?",
                (tenant, ITEM, conversation),
            ).fetchone()
            if expected not in (None, held):
                said = "The conversation has changed while it was answered: ask again."
                raise Refusal(said, 409, "conversation_changed", "conversation", 1.0)
            for place, item in enumerate(items, start):
                body = {"role": item.turn.role, "text": item.turn.text}
                self._insert(base, (tenant, ITEM, item.id, conversation, place), body)

    def remove_item(self, tenant: str, conversation: str, name: str) -> None:
        """Take one message out, if it is there."""
        with self._using() as base:
            base.execute(
                "DELETE FROM documents WHERE tenant = ? AND kind = ? AND parent = ? AND id = ?",
                (tenant, ITEM, conversation, name),
            )

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

    def _insert(
        self,
        base: sqlite3.Connection,
        key: tuple[str, str, str, str, int],
        body: dict[str, Any],
    ) -> None:
        text = json.dumps(body)
        closed = self._sealing.closed(key[0], text.encode(), "/".join(key[1:3]))
        kept = text if closed == text.encode() else closed
        base.execute(
            "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*key, time.time(), len(closed), kept),
        )

    def _opened(self, key: tuple[str, str, str], body: str | bytes) -> dict[str, Any]:
        """Raises: Damaged: the document is under another key, or under one and none is given."""
        if isinstance(body, str):
            return json.loads(body)
        try:
            return json.loads(self._sealing.opened(key[0], body, "/".join(key[1:])))
        except ValueError as error:
            raise Damaged("The archive is under a key: give --key-file.") from error

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
        where, own = "WHERE tenant = ? AND kind IN (?, ?)", (tenant, *LEAVING)
        (held,) = base.execute(
            f"SELECT coalesce(sum(bytes), 0) FROM documents {where}", own
        ).fetchone()
        while held > self._limit_bytes:
            row, size = base.execute(
                f"SELECT rowid, bytes FROM documents {where} ORDER BY made, rowid LIMIT 1", own
            ).fetchone()
            base.execute("DELETE FROM documents WHERE rowid = ?", (row,))
            held -= size
