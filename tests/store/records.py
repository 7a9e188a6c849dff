"""Records and the manifest that they are written in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from larder.store import (
    BlobRef,
    DeadlineExecutor,
    FileSystem,
    Manifest,
    Record,
    SessionEpochs,
    SessionKey,
    digest_of,
    open_file_system,
    tenant_of,
)

SECRET = b"s" * 32
TENANT = tenant_of(SECRET, "somebody")
KEY = SessionKey.named(TENANT, "talk")
SESSION = KEY.session


def a_ref(text: str = "tokens") -> BlobRef:
    return BlobRef(digest_of(text.encode()), len(text))


def a_record(epoch: int, **fields: Any) -> Record:
    made = {"tokens": a_ref(f"tokens {epoch}"), "num_tokens": epoch, "previous": epoch - 1}
    return Record(TENANT, SESSION, "talk", epoch, **(made | fields))


def heads_at(
    folder: Path, file_system: FileSystem | None = None, home: str = "home"
) -> SessionEpochs:
    file_system = open_file_system(str(folder / "store")) if file_system is None else file_system
    manifest = Manifest(folder / home / "manifest.sqlite", SECRET)
    return SessionEpochs(
        file_system, DeadlineExecutor("disk"), manifest, SECRET, damaged=lambda damage: None
    )
