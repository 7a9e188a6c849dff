"""The tables of a manifest, and SQLite's errors in our words."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from larder.core.errors import Damaged, StoreError, StoreFull, StoreSlow

SCHEMA = 3
BUSY_SECONDS = 5.0
OWNER = "PRAGMA application_id"

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
CREATE TABLE IF NOT EXISTS blobs (
    digest TEXT PRIMARY KEY, bytes INTEGER, tenant TEXT, written REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leaving (digest TEXT PRIMARY KEY, since REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY, tenant TEXT, identity TEXT, parent INTEGER, tokens BLOB, start INTEGER,
    key TEXT, prefix TEXT, digest TEXT, bytes INTEGER, last_used REAL, uses INTEGER,
    UNIQUE (tenant, identity, parent, tokens)
);
CREATE INDEX IF NOT EXISTS chunks_of ON chunks (digest);
CREATE TABLE IF NOT EXISTS written (day INTEGER PRIMARY KEY, bytes INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (tenant TEXT PRIMARY KEY, bytes INTEGER) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS blob_came AFTER INSERT ON blobs BEGIN
    INSERT INTO totals SELECT new.tenant, 0
        WHERE NOT EXISTS (SELECT 1 FROM totals WHERE tenant = new.tenant);
    UPDATE totals SET bytes = bytes + new.bytes WHERE tenant = new.tenant;
END;
CREATE TRIGGER IF NOT EXISTS blob_went AFTER DELETE ON blobs BEGIN
    UPDATE totals SET bytes = bytes - old.bytes WHERE tenant = old.tenant;
END;
"""
# From the schemas before: the first had no account of what tenants hold, the second had chunks
# without any use.
CARRIED_OVER = """
INSERT INTO totals SELECT tenant, sum(bytes) FROM blobs GROUP BY tenant;
UPDATE chunks SET uses = 1 WHERE uses = 0;
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
def errors(path: Path, busy_seconds: float = BUSY_SECONDS) -> Iterator[None]:
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
                f"{path} was held by others for {busy_seconds:g} s: try again."
            ) from error
        raise StoreError(f"{path} cannot be used ({error}): see to its disk.") from error


def claimed(rows: Callable[..., list[Any]], number: int) -> int:
    """The number of the store whose index this is; of a database without one, it is this store's.

    It stands in the file's header, where earlier larders have 0.
    """
    [(found,)] = rows(OWNER)
    if not found:
        rows(f"{OWNER} = {number}")
    return found or number


def move_aside(path: Path) -> Path:
    """Take a damaged database, and the log beside it, out of the way; where it is now."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("-wal", "-shm"):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
    path.replace(target)
    return target
