"""SQLite schema of a manifest, pragmas, and error translation."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from larder.core.errors import Damaged, StoreError, StoreFull, StoreSlow

SCHEMA_VERSION = 3
INCOMPLETE_SCHEMA = -SCHEMA_VERSION  # of a database that has not indexed all records yet
SYNCHRONOUS = "FULL"  # a commit survives a power cut
CHECKPOINT_PAGES = 64  # of 4 KiB: size of the write-ahead log
BUSY_SECONDS = 5.0
OWNER_PRAGMA = "PRAGMA application_id"
DATABASE_SUFFIXES = ("", "-wal", "-shm")  # suffixes of a database's files
REQUIRED_TABLES = frozenset(
    {"epochs", "sessions", "spans", "blobs", "chunks", "written"}
)  # of any schema
CURRENT_TABLES = REQUIRED_TABLES | {
    "leaving",
    "totals",
    "blob_came",
    "blob_went",
    "spans_of",
    "chunks_of",
}

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
# From earlier schemas: the first had no totals per tenant, the second had chunks of zero uses.
MIGRATION = """
INSERT INTO totals SELECT tenant, sum(bytes) FROM blobs GROUP BY tenant;
UPDATE chunks SET uses = 1 WHERE uses = 0;
"""

_CORRUPT_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
_FULL_CODES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)


@contextmanager
def translate_errors(path: Path, busy_seconds: float = BUSY_SECONDS) -> Iterator[None]:
    """Context that translates SQLite errors to the store's errors."""
    try:
        yield
    except sqlite3.Error as error:
        code = int(vars(error).get("sqlite_errorcode", 0)) & 0xFF
        if code in _CORRUPT_CODES or type(error) is sqlite3.DatabaseError:
            raise Damaged(f"{path} is damaged ({error}): it is built again.") from error
        if code in _FULL_CODES:
            raise StoreFull(
                f"{path} cannot be written ({error}): make room, or set LARDER_HOME to another "
                "folder. What was saved before is untouched."
            ) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreSlow(
                f"{path} was locked by other processes for {busy_seconds:g} s: try again."
            ) from error
        raise StoreError(f"{path} cannot be used ({error}): check its disk.") from error


def make_private(path: Path) -> None:
    """Restrict a database and the files beside it to this user, whatever the umask.

    SQLite creates further files with the permissions of the database.
    """
    with suppress(OSError):  # SQLite reports it in more detail
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    for suffix in DATABASE_SUFFIXES:
        with suppress(OSError):  # it is not there, or another user's
            path.with_name(f"{path.name}{suffix}").chmod(0o600)


def begin_log(database: sqlite3.Connection) -> None:
    """Give a database a write-ahead log, flushed at every commit."""
    for setting in ("journal_mode = WAL", f"synchronous = {SYNCHRONOUS}"):
        database.execute(f"PRAGMA {setting}").fetchall()


def prepare_schema(database: sqlite3.Connection, path: Path) -> None:
    """Create the schema in an empty database, or migrate an earlier one.

    Raises:
        Damaged: it is damaged, or no index of a store.
        StoreError: its schema is that of a later version.
    """
    begin_log(database)
    database.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}").fetchall()
    [(result,)] = database.execute("PRAGMA quick_check(1)").fetchall()
    if result != "ok":
        raise Damaged(f"{path} is damaged ({str(result)[:80]}): it is built again.")
    there = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    [(schema,)] = database.execute("PRAGMA user_version").fetchall()
    if there and not there >= REQUIRED_TABLES:
        raise Damaged(f"{path} is no index of a store, or lacks tables: it is built again.")
    if schema > SCHEMA_VERSION:
        raise StoreError(
            f"{path} is of schema {schema}, this larder reads {SCHEMA_VERSION}: use the "
            "version of larder that wrote it, or another LARDER_HOME."
        )
    if abs(schema) < SCHEMA_VERSION:
        carried = MIGRATION if there else ""
        statements = (
            f"{carried} PRAGMA user_version = {SCHEMA_VERSION if schema else INCOMPLETE_SCHEMA};"
        )
        database.executescript(
            f"BEGIN IMMEDIATE; {TABLES} DELETE FROM totals; {statements} COMMIT;"
        )
    elif not there >= CURRENT_TABLES:
        raise Damaged(f"{path} lacks tables: it is built again.")


def is_index_complete(rows: Callable[..., list[Any]]) -> bool:
    """True if the database has indexed everything beside the blobs."""
    return rows("PRAGMA user_version") != [(INCOMPLETE_SCHEMA,)]


def mark_index_complete(rows: Callable[..., list[Any]]) -> None:
    """Mark the index as complete."""
    rows(f"PRAGMA user_version = {SCHEMA_VERSION}")


def claim_owner(rows: Callable[..., list[Any]], number: int) -> int:
    """Number of the store that owns this index; an unowned database is assigned to this store.

    The number is in the file's header, where earlier versions have 0.
    """
    [(found,)] = rows(OWNER_PRAGMA)
    if not found:
        rows(f"{OWNER_PRAGMA} = {number}")
    return found or number


def quarantine_database(path: Path) -> Path:
    """Move a damaged database and its log aside; return the new path."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in reversed(
        DATABASE_SUFFIXES
    ):  # the database last: else a new one would find the old log
        with suppress(FileNotFoundError):
            path.with_name(f"{path.name}{suffix}").replace(f"{target}{suffix}")
    return target
