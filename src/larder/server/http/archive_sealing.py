"""An archive that was written in the open, or sealed by an earlier Larder, put under a key."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from larder.core.errors import Damaged, StoreError
from larder.server.http.archive import Archive, ConversationItem
from larder.server.http.archive_rows import CHECK_TENANT, ITEM, KEY_CHECK
from larder.server.request import ChatMessage
from larder.store.encryption import Encryption
from larder.store.sqlite import DATABASE_SUFFIXES

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
