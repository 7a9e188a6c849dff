"""A store under a key, or without one: which it is, and blobs and records as their owners see them.

key.json     {"version": 1, "salt": ..., "check": ...}, where there is a key
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from larder.core.errors import Damaged, StoreError
from larder.store.blobs import Blobs, Ref
from larder.store.chunk_notes import FOLDER as CHUNKS
from larder.store.container import canonical, parsed
from larder.store.deadline import Guard
from larder.store.envelopes import disowned, ids_of, owned
from larder.store.places import Entry, Place
from larder.store.records import FOLDER as SESSIONS
from larder.store.records import Record
from larder.store.sealing import KEY_BYTES, Sealed, Sealing, Unsealed

PATH, VERSION = "key.json", 1
CHECKED = b"larder store"
NOBODY = "nobody"  # whose key the check is under; no tenant is called so


def sealing_of(place: Place, guard: Guard, key: bytes | None) -> Sealing:
    """How things lie in a store; an empty one is begun with the key, or without.

    Raises:
        StoreError: it was begun with another key, with one and none is given, or without one.
    """
    try:
        found = guard.call(place.read, PATH)
    except FileNotFoundError:
        return Unsealed() if key is None else _begun(place, guard, key)
    if key is None:
        raise StoreError(
            f"The store at {place.url} is under a key: give --key-file FILE, or take another store."
        )
    return _checked(found, key, place.url)


def _begun(place: Place, guard: Guard, key: bytes) -> Sealing:
    if guard.call(_has_any, place):
        raise StoreError(
            f"The store at {place.url} was begun without a key: leave --key-file out, or take "
            "another store and carry sessions over by 'larder cache export' and 'import'."
        )
    salt = secrets.token_bytes(KEY_BYTES)
    sealing = Sealed(key, salt)
    check = sealing.closed(NOBODY, CHECKED, PATH)
    told = {"version": VERSION, "salt": salt.hex(), "check": check.hex()}
    try:
        guard.call(place.create, PATH, canonical(told).encode())
    except FileExistsError:  # somebody else has begun it meanwhile
        return _checked(guard.call(place.read, PATH), key, place.url)
    return sealing


def _checked(found: bytes, key: bytes, url: str) -> Sealing:
    try:
        told = parsed(found)
        version, salt, check = told["version"], bytes.fromhex(told["salt"]), told["check"]
        hidden = bytes.fromhex(check)
    except (Damaged, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{PATH} of the store at {url} is damaged: put it back from a copy; without it nothing "
            "there can be opened."
        ) from error
    if version != VERSION:
        raise StoreError(f"The store at {url} is under a key of a later larder: use that one.")
    sealing = Sealed(key, salt)
    try:
        sealing.opened(NOBODY, hidden, PATH)
    except Damaged as error:
        raise StoreError(
            f"The store at {url} is under another key: give the file of the key that it was begun "
            "with."
        ) from error
    return sealing


def _has_any(place: Place) -> bool:
    return any(True for folder in (SESSIONS, CHUNKS) for _ in place.listing(folder))


class Vault:
    """Blobs as their tenants have put them. Safe from threads and processes."""

    def __init__(self, blobs: Blobs, sealing: Sealing) -> None:
        self.blobs, self._sealing = blobs, sealing

    def get(self, ref: Ref, tenant: str) -> bytes:
        """The bytes, verified.

        Raises:
            Damaged: as `Blobs.get`, or they are another tenant's.
        """
        return self._sealing.opened(tenant, self.blobs.get(ref))

    def ids(self, record: Record) -> tuple[int, ...]:
        """The tokens of a session.

        Raises:
            Damaged, Refused: their log is none, or another's.
        """
        data = self.get(record.tokens, record.tenant)
        return ids_of(data, record.num_tokens, record.tenant, record.session)

    def transcript(self, record: Record) -> bytes:
        """What was said as text, where it was kept.

        Raises:
            Damaged, Refused: it is not what was written, or another's.
        """
        if record.transcript is None:
            raise Damaged("What was said was not kept as text.")
        data = self.get(record.transcript, record.tenant)
        return disowned(data, record.tenant, record.session)

    def beside(self, record: Record) -> bytes | None:
        """What is told beside a session's caches, where anything is.

        Raises:
            Damaged, Refused: it is not what was written, or another's.
        """
        if record.beside is None:
            return None
        return disowned(self.get(record.beside, record.tenant), record.tenant)

    def handed_on(self, record: Record, heir: str) -> dict[str, bytes]:
        """What a session cannot do without, as the bytes of another one of its tenant's, by part.

        Raises:
            Damaged, Refused: it is not what was written, or another's.
        """
        own = {"tokens": record.tokens, "transcript": record.transcript}
        kept = {part: self.get(ref, record.tenant) for part, ref in own.items() if ref is not None}
        return {
            part: owned(disowned(data, record.tenant, record.session), record.tenant, heir)
            for part, data in kept.items()
        }

    def closed(self, data: bytes, tenant: str) -> bytes:
        """Bytes as a blob of a tenant has them."""
        return self._sealing.closed(tenant, data)


class SealedPlace(Place):
    """Records of sessions and chunks as their tenants have written them; nothing else lies here.

    A path begins with a word and the tenant: what lies at another place does not open.
    """

    def __init__(self, inner: Place, sealing: Sealing) -> None:
        self._inner, self._sealing, self.url = inner, sealing, inner.url

    def create(self, path: str, data: bytes) -> None:
        self._inner.create(path, self._closed(path, data))

    def replace(self, path: str, data: bytes) -> None:
        self._inner.replace(path, self._closed(path, data))

    def read(self, path: str) -> bytes:
        return self._sealing.opened(_tenant(path), self._inner.read(path), path)

    def size(self, path: str) -> int | None:
        return self._inner.size(path)

    def touch(self, path: str, data: bytes) -> None:
        self._inner.touch(path, self._closed(path, data))

    def remove(self, path: str) -> None:
        self._inner.remove(path)

    def listing(self, folder: str) -> Iterator[Entry]:
        return self._inner.listing(folder)

    def set_aside(self, path: str) -> None:
        self._inner.set_aside(path)

    def _closed(self, path: str, data: bytes) -> bytes:
        return self._sealing.closed(_tenant(path), data, path)


def _tenant(path: str) -> str:
    return path.split("/")[1]
