"""Records and the manifest that they are written in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from larder.store.blobs import Ref
from larder.store.deadline import Guard
from larder.store.digests import digest_of, tenant_of
from larder.store.heads import Heads
from larder.store.manifest import Manifest
from larder.store.places import Place, place_at
from larder.store.records import Record, session_key

SECRET = b"s" * 32
TENANT = tenant_of(SECRET, "somebody")
SESSION = session_key(TENANT, "talk")


def a_ref(text: str = "tokens") -> Ref:
    return Ref(digest_of(text.encode()), len(text))


def a_record(epoch: int, **told: Any) -> Record:
    made = {"tokens": a_ref(f"tokens {epoch}"), "num_tokens": epoch, "previous": epoch - 1}
    return Record(TENANT, SESSION, "talk", epoch, **(made | told))


def heads_at(folder: Path, place: Place | None = None, home: str = "home") -> Heads:
    place = place_at(str(folder / "store")) if place is None else place
    manifest = Manifest(folder / home / "manifest.sqlite", SECRET)
    return Heads(place, Guard("disk"), manifest, SECRET, damaged=lambda said: None)
