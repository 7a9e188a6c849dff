"""Rows of the archive as they lie on the disk: open, or sealed under a key.

Under a key tenants, ids and parents are keyed digests, and a body is sealed (AES-GCM) together with
all that stands beside it: kind, id, parent, place, time. A row that was changed, moved or given to
another tenant does not open. What belongs to one conversation is sealed once more as a whole, in a
row of kind `contents`: its document, and the digests of its messages in order. So none of them can
be left out, repeated or put back alone. What nobody can tell: that a whole document, or a whole
conversation with its contents, was deleted or put back as it once was.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from larder.core.errors import Damaged, StoreError
from larder.store.digests import digest_of, key_of
from larder.store.encryption import Encryption

TABLE = """
CREATE TABLE IF NOT EXISTS documents (
    tenant TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL, parent TEXT NOT NULL,
    place INTEGER NOT NULL, made REAL NOT NULL, bytes INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (tenant, kind, id)
);
CREATE INDEX IF NOT EXISTS by_parent ON documents (tenant, kind, parent, place);
CREATE INDEX IF NOT EXISTS by_age ON documents (tenant, kind, made);
"""
CONVERSATION, ITEM = "conversation", "item"
CONTENTS = "contents"  # of a conversation under a key
KEY_CHECK = "key"  # the kind of the row that tells whether a key is the archive's
VERSION = 2  # of sealed rows; the first had ids and parents in the open
CHECK_TENANT = ""  # whose key tenants are tagged by; no tenant is called so
_COLUMNS = "id, parent, place, made, body"
_Row = tuple[str, str, int, float, str | bytes]


@dataclass(frozen=True)
class ConversationContents:
    """What a conversation consists of.

    Args:
        count: of its messages.
        chain: digest of them all, in order.
        document: digest of its own document; empty where there is none.
    """

    count: int = 0
    chain: str = ""
    document: str = ""

    def plus(self, row: _Row) -> ConversationContents:
        """With one message more."""
        own = key_of(self.chain, row[0], str(row[2]), _digest(row))
        return replace(self, count=self.count + 1, chain=own)


class ArchiveRows:
    """Reads and writes documents inside transactions of the caller.

    Args:
        sealing: how they are hidden.
    """

    def __init__(self, sealing: Encryption) -> None:
        self._sealing = sealing

    def check(self, base: sqlite3.Connection) -> None:
        """Have an archive be under this key, or under none; an empty one is begun so.

        Raises:
            StoreError: it is otherwise.
        """
        asked = f"SELECT {_COLUMNS} FROM documents WHERE tenant = ? AND kind = ?"
        found = base.execute(asked, (CHECK_TENANT, KEY_CHECK)).fetchone()
        if found and not self._sealing.is_encrypted:
            raise StoreError("The archive of conversations is under a key: give --key-file FILE.")
        if found:
            try:
                self._opened(CHECK_TENANT, KEY_CHECK, found)
            except Damaged as error:
                raise StoreError(
                    "The archive of conversations is under another key: give the file of the key "
                    "that it was begun with."
                ) from error
        elif self._sealing.is_encrypted:
            if base.execute("SELECT 1 FROM documents LIMIT 1").fetchone():
                raise StoreError(
                    "The archive of conversations was written without a key, or by an earlier "
                    "Larder that did not seal all of it, so nobody can tell who has written it: "
                    "'larder cache seal --key-file FILE' seals it as it stands."
                )
            self._insert(base, CHECK_TENANT, KEY_CHECK, ("", "", VERSION, time.time()), "")

    def owner(self, tenant: str) -> str:
        """A tenant as a row shows it."""
        return self._sealing.tag(CHECK_TENANT, tenant) if tenant else CHECK_TENANT

    def get(self, base: sqlite3.Connection, tenant: str, kind: str, name: str) -> Any | None:
        """A document; None where there is none.

        Raises:
            Damaged: it is not what was written.
        """
        row = self._row(base, tenant, kind, name)
        if kind == CONVERSATION:
            contents = self._contents(base, tenant, name)
            if contents and contents.document != (_digest(row) if row else ""):
                raise _tampered(name)
        return None if row is None else self._opened(tenant, kind, row)[1]

    def put(
        self,
        base: sqlite3.Connection,
        tenant: str,
        kind: str,
        name: str,
        body: Any,
        made: float | None = None,
    ) -> None:
        """Write a document, whether it is there or not."""
        contents = self._contents(base, tenant, name) if kind == CONVERSATION else None
        own = self._tag(tenant, name), "", 0, time.time() if made is None else float(made)
        row = self._insert(base, tenant, kind, own, name, body)
        if contents:
            self._set_contents(base, tenant, name, replace(contents, document=_digest(row)))

    def items(self, base: sqlite3.Connection, tenant: str, parent: str) -> list[tuple[str, Any]]:
        """Ids and bodies of a conversation's messages in order.

        Raises:
            Damaged: one is not what was written, is lacking, or stands where it did not.
        """
        rows = self._children(base, tenant, parent)
        contents = self._contents(base, tenant, parent)
        if contents and contents != _contents_of(rows, contents):
            raise _tampered(parent)
        opened = (self._opened(tenant, ITEM, row) for row in rows)
        return [(name or row[0], body) for row, (name, body) in zip(rows, opened, strict=True)]

    def count(self, base: sqlite3.Connection, tenant: str, parent: str) -> int:
        """How many messages a conversation has."""
        own = self.owner(tenant), ITEM, self._tag(tenant, parent)
        asked = "SELECT count(*) FROM documents WHERE tenant = ? AND kind = ? AND parent = ?"
        return base.execute(asked, own).fetchone()[0]

    def append(
        self,
        base: sqlite3.Connection,
        tenant: str,
        parent: str,
        bodies: Sequence[tuple[str, Any]],
        made: float | None = None,
    ) -> None:
        """Add messages at the end of a conversation, each an id and a body.

        Raises:
            Damaged: messages are lacking that were there.
        """
        contents = self._contents(base, tenant, parent)
        if contents and contents.count != self.count(base, tenant, parent):
            raise _tampered(parent)
        own = self.owner(tenant), ITEM, self._tag(tenant, parent)
        asked = "SELECT coalesce(max(place) + 1, 0) FROM documents "
        asked += "WHERE tenant = ? AND kind = ? AND parent = ?"
        (start,) = base.execute(asked, own).fetchone()
        for place, (name, body) in enumerate(bodies, start):
            now = time.time() if made is None else float(made)
            where = self._tag(tenant, name), own[2], place, now
            row = self._insert(base, tenant, ITEM, where, name, body)
            contents = contents and contents.plus(row)
        if contents:
            self._set_contents(base, tenant, parent, contents)

    def remove(self, base: sqlite3.Connection, tenant: str, kind: str, name: str) -> bool:
        """Delete a document and what is in it; whether it was there."""
        owner, tag = self.owner(tenant), self._tag(tenant, name)
        for below in (ITEM, CONTENTS):
            asked = "DELETE FROM documents WHERE tenant = ? AND kind = ? AND parent = ?"
            base.execute(asked, (owner, below, tag))
        asked = "DELETE FROM documents WHERE tenant = ? AND kind = ? AND id = ?"
        return base.execute(asked, (owner, kind, tag)).rowcount > 0

    def remove_item(self, base: sqlite3.Connection, tenant: str, parent: str, name: str) -> None:
        """Take one message out of a conversation, if it is there.

        Raises:
            Damaged: as `items`.
        """
        self.items(base, tenant, parent)  # else what was altered would be sealed as it stands
        own = self.owner(tenant), ITEM, self._tag(tenant, parent), self._tag(tenant, name)
        asked = "DELETE FROM documents WHERE tenant = ? AND kind = ? AND parent = ? AND id = ?"
        base.execute(asked, own)
        contents = self._contents(base, tenant, parent)
        if contents:
            rows = self._children(base, tenant, parent)
            self._set_contents(base, tenant, parent, _contents_of(rows, contents))

    def _row(self, base: sqlite3.Connection, tenant: str, kind: str, name: str) -> _Row | None:
        return base.execute(
            f"SELECT {_COLUMNS} FROM documents WHERE tenant = ? AND kind = ? AND id = ?",
            (self.owner(tenant), kind, self._tag(tenant, name)),
        ).fetchone()

    def _children(self, base: sqlite3.Connection, tenant: str, parent: str) -> list[_Row]:
        return base.execute(
            f"SELECT {_COLUMNS} FROM documents WHERE tenant = ? AND kind = ? AND parent = ? "
            "ORDER BY place",
            (self.owner(tenant), ITEM, self._tag(tenant, parent)),
        ).fetchall()

    def _contents(
        self, base: sqlite3.Connection, tenant: str, name: str
    ) -> ConversationContents | None:
        """What is sealed of a conversation as a whole; None where there is no key."""
        if not self._sealing.is_encrypted:
            return None
        row = self._row(base, tenant, CONTENTS, name)
        return (
            ConversationContents()
            if row is None
            else ConversationContents(**self._opened(tenant, CONTENTS, row)[1])
        )

    def _set_contents(
        self, base: sqlite3.Connection, tenant: str, name: str, contents: ConversationContents
    ) -> None:
        tag = self._tag(tenant, name)
        self._insert(base, tenant, CONTENTS, (tag, tag, 0, 0.0), name, asdict(contents))

    def _insert(
        self,
        base: sqlite3.Connection,
        tenant: str,
        kind: str,
        own: tuple[str, str, int, float],
        name: str,
        body: Any = None,
    ) -> _Row:
        told = [name, body] if self._sealing.is_encrypted else body
        data = json.dumps(told).encode()
        closed = self._sealing.closed(tenant, data, _associated_data(kind, *own))
        row = (*own, closed if self._sealing.is_encrypted else closed.decode())
        base.execute(
            "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (self.owner(tenant), kind, *own, len(closed), row[-1]),
        )
        return row

    def _opened(self, tenant: str, kind: str, row: _Row) -> tuple[str, Any]:
        """The id of a document, which is empty where it stands in the open, and its body."""
        *own, body = row
        if not self._sealing.is_encrypted:
            if not isinstance(body, str):
                raise Damaged("The archive is under a key: give --key-file.")
            return "", json.loads(body)
        if not isinstance(body, bytes):
            raise Damaged("A document of the archive lies open, though the archive is under a key.")
        name, told = json.loads(self._sealing.opened(tenant, body, _associated_data(kind, *own)))
        return name, told

    def _tag(self, tenant: str, name: str) -> str:
        return self._sealing.tag(tenant, name)


def _contents_of(rows: Sequence[_Row], contents: ConversationContents) -> ConversationContents:
    """What a conversation of these messages consists of."""
    found = ConversationContents(document=contents.document)
    for row in rows:
        found = found.plus(row)
    return found


def _associated_data(kind: str, *own: object) -> str:
    """What is sealed along with a body."""
    return json.dumps([VERSION, kind, *own])


def _digest(row: _Row) -> str:
    body = row[-1]
    return digest_of(body if isinstance(body, bytes) else body.encode())


def _tampered(name: str) -> Damaged:
    return Damaged(
        f"Conversation {name!r} is not what was written: its document or some of its messages were "
        "changed, deleted or put back. Delete the conversation, or put the archive back from a "
        "copy."
    )
