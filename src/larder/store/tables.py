"""The tables of a manifest, and SQLite's errors in our words."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from larder.core.errors import Damaged, StoreError, StoreFull, StoreSlow

SCHEMA = 1
BUSY_SECONDS = 10.0

TABLES = """
CREATE TABLE IF NOT EXISTS epochs (
    tenant TEXT, session TEXT, epoch INTEGER, record BLOB, PRIMARY KEY (tenant, session, epoch)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    tenant TEXT, session TEXT, head INTEGER, last_used REAL, uses INTEGER,
    PRIMARY KEY (tenant, session)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spans (
    digest TEXT, tenant TEXT, session TEXT, epoch INTEGER,
    PRIMARY KEY (digest, tenant, session, epoch)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS spans_of ON spans (tenant, session, epoch);
CREATE TABLE IF NOT EXISTS leases (
    tenant TEXT, session TEXT, holder TEXT, term INTEGER, until REAL,
    PRIMARY KEY (tenant, session)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blobs (
    digest TEXT PRIMARY KEY, bytes INTEGER, tenant TEXT, written REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY, tenant TEXT, identity TEXT, parent INTEGER, tokens BLOB, start INTEGER,
    key TEXT, prefix TEXT, digest TEXT, bytes INTEGER, last_used REAL, uses INTEGER,
    UNIQUE (tenant, identity, parent, tokens)
);
CREATE INDEX IF NOT EXISTS chunks_of ON chunks (digest);
CREATE TABLE IF NOT EXISTS written (day INTEGER PRIMARY KEY, bytes INTEGER) WITHOUT ROWID;
"""

_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
_FULL = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)


@contextmanager
def errors(path: Path) -> Iterator[None]:
    """SQLite's errors in our words."""
    try:
        yield
    except sqlite3.Error as error:
        code = int(vars(error).get("sqlite_errorcode", 0)) & 0xFF
        if code in _BROKEN or type(error) is sqlite3.DatabaseError:
            raise Damaged(f"{path} is damaged ({error}): it is built again.") from error
        if code in _FULL:
            raise StoreFull(
                f"{path} cannot be written ({error}): make room, or set LARDER_HOME to another "
                "folder. What was saved before is untouched."
            ) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreSlow(
                f"{path} was held by others for {BUSY_SECONDS:g} s: try again."
            ) from error
        raise StoreError(f"{path} cannot be used ({error}): see to its disk.") from error
