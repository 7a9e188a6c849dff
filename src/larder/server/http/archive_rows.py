"""Rows of the SQLite archive, in plain text or encrypted.

With a key, tenants, ids and parents are keyed digests, and a body is sealed (AES-GCM) with kind,
id, parent, place and time as associated data: a row that was changed, moved or given to another
tenant does not open. Each conversation has one more sealed row of kind `contents`, with the digests
of its document and of its messages in order, so that none of them can be left out, repeated or
rolled back alone. Not detected: deletion or rollback of a whole document, or of a whole
conversation with its contents row.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
CONTENTS = "contents"  # digest row of an encrypted conversation
KEY_CHECK = "key"  # row that verifies the key of the archive
ARCHIVE_VERSION = 1  # of the tables
VERSION = 2  # of sealed rows; version 1 had ids and parents in plain text
CHECK_TENANT = ""  # its key derives the tags of tenants; no tenant has an empty name
_COLUMNS = "id, parent, place, made, body"
_Row = tuple[str, str, int, float, str | bytes]


@dataclass(frozen=True)
class ConversationContents:
    """Digests of the contents of a conversation.

    Args:
        count: number of messages.
        chain: digest of all messages in order.
        document: digest of the conversation's own document; empty if there is none.
    """

    count: int = 0
    chain: str = ""
    document: str = ""

    def plus(self, row: _Row) -> ConversationContents:
        """Contents with one message appended."""
        chain = key_of(self.chain, row[0], str(row[2]), _digest(row))
        return replace(self, count=self.count + 1, chain=chain)


def check_version(base: sqlite3.Connection, path: Path | None) -> None:
    """Mark an archive with its version; the first had none, and is of the same form.

    Raises:
        StoreError: it is that of a later version.
    """
    [(version,)] = base.execute("PRAGMA user_version").fetchall()
    if version > ARCHIVE_VERSION:
        raise StoreError(
            f"{path} is an archive of version {version}, this larder reads {ARCHIVE_VERSION}: it "
            "is left as it is; use the version of larder that wrote it."
        )
    if version < ARCHIVE_VERSION:
        base.execute(f"PRAGMA user_version = {ARCHIVE_VERSION}")


class ArchiveRows:
    """Reader and writer of archive rows, inside transactions of the caller.

    Args:
        base: the archive.
        sealing: encryption of bodies and tags.
    """

    def __init__(self, base: sqlite3.Connection, sealing: Encryption) -> None:
        self._base, self._sealing = base, sealing

    def check(self) -> None:
        """Verify the key of an archive; an empty archive is initialized with it.

        Raises:
            StoreError: the archive has another key, or a key is missing or unexpected.
        """
        query = f"SELECT {_COLUMNS} FROM documents WHERE tenant = ? AND kind = ?"
        row = self._base.execute(query, (CHECK_TENANT, KEY_CHECK)).fetchone()
        if row and not self._sealing.is_encrypted:
            raise StoreError("The archive of conversations is encrypted: give --key-file FILE.")
        if row:
            try:
                self._decrypted(CHECK_TENANT, KEY_CHECK, row)
            except Damaged as error:
                raise StoreError(
                    "The archive of conversations is encrypted with another key: give the key file "
                    "that it was created with."
                ) from error
        elif self._sealing.is_encrypted:
            if self._base.execute("SELECT 1 FROM documents LIMIT 1").fetchone():
                raise StoreError(
                    "The archive of conversations was written without a key, or by an earlier "
                    "Larder that did not seal all of it, so its origin cannot be verified: "
                    "run 'larder cache seal --key-file FILE' to seal it as it is."
                )
            self._insert(CHECK_TENANT, KEY_CHECK, ("", "", VERSION, time.time()), "")

    def owner(self, tenant: str) -> str:
        """Tag of a tenant as stored in a row."""
        return self._sealing.tag(CHECK_TENANT, tenant) if tenant else CHECK_TENANT

    def get(self, tenant: str, kind: str, name: str) -> Any | None:
        """Body of a document, or None.

        Raises:
            Damaged: the document was altered.
        """
        row = self._row(tenant, kind, name)
        if kind == CONVERSATION:
            contents = self._contents(tenant, name)
            if contents and contents.document != (_digest(row) if row else ""):
                raise _tampered(name)
        return None if row is None else self._decrypted(tenant, kind, row)[1]

    def put(
        self, tenant: str, kind: str, name: str, body: Any, created: float | None = None
    ) -> None:
        """Insert or replace a document."""
        contents = self._contents(tenant, name) if kind == CONVERSATION else None
        columns = self._tag(tenant, name), "", 0, time.time() if created is None else float(created)
        row = self._insert(tenant, kind, columns, name, body)
        if contents:
            self._set_contents(tenant, name, replace(contents, document=_digest(row)))

    def items(self, tenant: str, parent: str) -> list[tuple[str, Any]]:
        """Ids and bodies of a conversation's messages in order.

        Raises:
            Damaged: a message was altered, removed or moved.
        """
        rows = self._children(tenant, parent)
        contents = self._contents(tenant, parent)
        if contents and contents != _contents_of(rows, contents):
            raise _tampered(parent)
        decrypted = (self._decrypted(tenant, ITEM, row) for row in rows)
        return [(name or row[0], body) for row, (name, body) in zip(rows, decrypted, strict=True)]

    def count(self, tenant: str, parent: str) -> int:
        """Number of messages in a conversation."""
        columns = self.owner(tenant), ITEM, self._tag(tenant, parent)
        query = "SELECT count(*) FROM documents WHERE tenant = ? AND kind = ? AND parent = ?"
        return self._base.execute(query, columns).fetchone()[0]

    def append(
        self,
        tenant: str,
        parent: str,
        bodies: Sequence[tuple[str, Any]],
        created: float | None = None,
    ) -> None:
        """Append messages to a conversation, each an id and a body.

        Raises:
            Damaged: earlier messages are missing.
        """
        contents = self._contents(tenant, parent)
        if contents and contents.count != self.count(tenant, parent):
            raise _tampered(parent)
        columns = self.owner(tenant), ITEM, self._tag(tenant, parent)
        query = "SELECT coalesce(max(place) + 1, 0) FROM documents "
        query += "WHERE tenant = ? AND kind = ? AND parent = ?"
        (start,) = self._base.execute(query, columns).fetchone()
        for place, (name, body) in enumerate(bodies, start):
            now = time.time() if created is None else float(created)
            where = self._tag(tenant, name), columns[2], place, now
            row = self._insert(tenant, ITEM, where, name, body)
            contents = contents and contents.plus(row)
        if contents:
            self._set_contents(tenant, parent, contents)

    def remove(self, tenant: str, kind: str, name: str) -> bool:
        """Delete a document and its items; True if it existed."""
        owner, tag = self.owner(tenant), self._tag(tenant, name)
        for below in (ITEM, CONTENTS):
            query = "DELETE FROM documents WHERE tenant = ? AND kind = ? AND parent = ?"
            self._base.execute(query, (owner, below, tag))
        query = "DELETE FROM documents WHERE tenant = ? AND kind = ? AND id = ?"
        return self._base.execute(query, (owner, kind, tag)).rowcount > 0

    def remove_item(self, tenant: str, parent: str, name: str) -> None:
        """Delete one message of a conversation, if it exists.

        Raises:
            Damaged: a message was altered, removed or moved.
        """
        self.items(tenant, parent)  # verifies, so that no altered message is sealed again
        columns = self.owner(tenant), ITEM, self._tag(tenant, parent), self._tag(tenant, name)
        query = "DELETE FROM documents WHERE tenant = ? AND kind = ? AND parent = ? AND id = ?"
        self._base.execute(query, columns)
        contents = self._contents(tenant, parent)
        if contents:
            rows = self._children(tenant, parent)
            self._set_contents(tenant, parent, _contents_of(rows, contents))

    def _row(self, tenant: str, kind: str, name: str) -> _Row | None:
        return self._base.execute(
            f"SELECT {_COLUMNS} FROM documents WHERE tenant = ? AND kind = ? AND id = ?",
            (self.owner(tenant), kind, self._tag(tenant, name)),
        ).fetchone()

    def _children(self, tenant: str, parent: str) -> list[_Row]:
        return self._base.execute(
            f"SELECT {_COLUMNS} FROM documents WHERE tenant = ? AND kind = ? AND parent = ? "
            "ORDER BY place",
            (self.owner(tenant), ITEM, self._tag(tenant, parent)),
        ).fetchall()

    def _contents(self, tenant: str, name: str) -> ConversationContents | None:
        """Sealed contents of a conversation; None without encryption."""
        if not self._sealing.is_encrypted:
            return None
        row = self._row(tenant, CONTENTS, name)
        return (
            ConversationContents()
            if row is None
            else ConversationContents(**self._decrypted(tenant, CONTENTS, row)[1])
        )

    def _set_contents(self, tenant: str, name: str, contents: ConversationContents) -> None:
        tag = self._tag(tenant, name)
        self._insert(tenant, CONTENTS, (tag, tag, 0, 0.0), name, asdict(contents))

    def _insert(
        self,
        tenant: str,
        kind: str,
        columns: tuple[str, str, int, float],
        name: str,
        body: Any = None,
    ) -> _Row:
        body = [name, body] if self._sealing.is_encrypted else body
        data = json.dumps(body).encode()
        encrypted = self._sealing.encrypt(tenant, data, _associated_data(kind, columns))
        row = (*columns, encrypted if self._sealing.is_encrypted else encrypted.decode())
        self._base.execute(
            "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (self.owner(tenant), kind, *columns, len(encrypted), row[-1]),
        )
        return row

    def _decrypted(self, tenant: str, kind: str, row: _Row) -> tuple[str, Any]:
        """Id and body of a row; the id is empty without encryption."""
        *columns, body = row
        if not self._sealing.is_encrypted:
            if not isinstance(body, str):
                raise Damaged("The archive is encrypted: give --key-file.")
            return "", json.loads(body)
        if not isinstance(body, bytes):
            raise Damaged("A document of the encrypted archive is in plain text.")
        name, body = json.loads(
            self._sealing.decrypt(tenant, body, _associated_data(kind, columns))
        )
        return name, body

    def _tag(self, tenant: str, name: str) -> str:
        return self._sealing.tag(tenant, name)


def _contents_of(rows: Sequence[_Row], contents: ConversationContents) -> ConversationContents:
    """Contents computed from message rows, with the given document digest."""
    computed = ConversationContents(document=contents.document)
    for row in rows:
        computed = computed.plus(row)
    return computed


def _associated_data(kind: str, columns: Sequence[object]) -> str:
    """Associated data of a sealed body: version, kind, id, parent, place and time."""
    return json.dumps([VERSION, kind, *columns])


def _digest(row: _Row) -> str:
    body = row[-1]
    return digest_of(body if isinstance(body, bytes) else body.encode())


def _tampered(name: str) -> Damaged:
    return Damaged(
        f"Conversation {name!r} was altered: its document or some of its messages were changed, "
        "deleted or rolled back. Delete the conversation, or restore the archive from a backup."
    )
