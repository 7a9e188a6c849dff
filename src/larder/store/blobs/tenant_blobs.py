"""Encryption of a store, and its blobs and records as decrypted for their tenants.

key.json     {"version": 1, "salt": ..., "check": ...}, where there is a key
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from larder.core.errors import Damaged, StoreError
from larder.store.blobs.blob_store import BlobRef, BlobStore
from larder.store.blobs.container import canonical_json, parse_json
from larder.store.blobs.payloads import add_owner, decode_token_log, strip_owner
from larder.store.encryption import KEY_BYTES, AesGcmEncryption, Encryption, NoEncryption
from larder.store.fs.base import FileInfo, FileSystem
from larder.store.fs.deadline import DeadlineExecutor
from larder.store.prefix.chunk_records import CHUNKS_FOLDER as CHUNKS
from larder.store.sessions.records import SESSIONS_FOLDER as SESSIONS
from larder.store.sessions.records import Record

KEY_PATH, KEY_FILE_VERSION = "key.json", 1
CHECK_PLAINTEXT = b"larder store"
CHECK_TENANT = "nobody"  # whose key the check is under; no tenant is called so


def open_encryption(place: FileSystem, guard: DeadlineExecutor, key: bytes | None) -> Encryption:
    """Open the encryption of a store; an empty store is initialized with the key, or without one.

    Raises:
        StoreError: it was created with another key, with a key and none is given, or without one.
    """
    try:
        found = guard.call(place.read, KEY_PATH)
    except FileNotFoundError:
        return NoEncryption() if key is None else _create_key_file(place, guard, key)
    if key is None:
        raise StoreError(
            f"The store at {place.url} is under a key: give --key-file FILE, or use another store."
        )
    return _verify_key(found, key, place.url)


def _create_key_file(place: FileSystem, guard: DeadlineExecutor, key: bytes) -> Encryption:
    if guard.call(_is_in_use, place):
        raise StoreError(
            f"The store at {place.url} was begun without a key: leave --key-file out, or take "
            "another store and carry sessions over by 'larder cache export' and 'import'."
        )
    salt = secrets.token_bytes(KEY_BYTES)
    sealing = AesGcmEncryption(key, salt)
    check = sealing.closed(CHECK_TENANT, CHECK_PLAINTEXT, KEY_PATH)
    told = {"version": KEY_FILE_VERSION, "salt": salt.hex(), "check": check.hex()}
    try:
        guard.call(place.create, KEY_PATH, canonical_json(told).encode())
    except FileExistsError:  # another process has created it meanwhile
        return _verify_key(guard.call(place.read, KEY_PATH), key, place.url)
    return sealing


def _verify_key(found: bytes, key: bytes, url: str) -> Encryption:
    try:
        told = parse_json(found)
        version, salt, check = told["version"], bytes.fromhex(told["salt"]), told["check"]
        hidden = bytes.fromhex(check)
    except (Damaged, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{KEY_PATH} of the store at {url} is damaged: put it back from a copy; the store "
            "cannot be decrypted without it."
        ) from error
    if version != KEY_FILE_VERSION:
        raise StoreError(
            f"The store at {url} has a key file of a later version of larder: use that version."
        )
    sealing = AesGcmEncryption(key, salt)
    try:
        sealing.opened(CHECK_TENANT, hidden, KEY_PATH)
    except Damaged as error:
        raise StoreError(
            f"The store at {url} is under another key: give the key file that it was created with."
        ) from error
    return sealing


def _is_in_use(place: FileSystem) -> bool:
    return any(True for folder in (SESSIONS, CHUNKS) for _ in place.list_files(folder))


class TenantBlobs:
    """Blobs decrypted for their tenant. Safe from threads and processes."""

    def __init__(self, blobs: BlobStore, sealing: Encryption) -> None:
        self.blobs, self._sealing = blobs, sealing

    def get(self, ref: BlobRef, tenant: str) -> bytes:
        """Read, verify and decrypt a blob.

        Raises:
            Damaged: as `BlobStore.get`, or they are another tenant's.
        """
        return self._sealing.opened(tenant, self.blobs.get(ref))

    def ids(self, record: Record) -> tuple[int, ...]:
        """Token ids of a session.

        Raises:
            Damaged, Refused: their log is none, or another's.
        """
        data = self.get(record.tokens, record.tenant)
        return decode_token_log(data, record.num_tokens, record.tenant, record.session)

    def transcript(self, record: Record) -> bytes:
        """Transcript of a session.

        Raises:
            Damaged, Refused: it is not what was written, or another's.
        """
        if record.transcript is None:
            raise Damaged("The session was saved without a transcript.")
        data = self.get(record.transcript, record.tenant)
        return strip_owner(data, record.tenant, record.session)

    def beside(self, record: Record) -> bytes | None:
        """Extra state saved with a session's caches; None if there is none.

        Raises:
            Damaged, Refused: it is not what was written, or another's.
        """
        if record.beside is None:
            return None
        return strip_owner(self.get(record.beside, record.tenant), record.tenant)

    def change_session(self, record: Record, heir: str) -> dict[str, bytes]:
        """Token log and transcript re-encoded for another session of the tenant, by part.

        Raises:
            Damaged, Refused: it is not what was written, or another's.
        """
        own = {"tokens": record.tokens, "transcript": record.transcript}
        kept = {part: self.get(ref, record.tenant) for part, ref in own.items() if ref is not None}
        return {
            part: add_owner(strip_owner(data, record.tenant, record.session), record.tenant, heir)
            for part, data in kept.items()
        }

    def closed(self, data: bytes, tenant: str) -> bytes:
        """Encrypt bytes as a blob of a tenant."""
        return self._sealing.closed(tenant, data)


class EncryptedFileSystem(FileSystem):
    """File system whose records are encrypted per tenant.

    A path begins with a word and the tenant: what lies at another place does not open.
    """

    def __init__(self, inner: FileSystem, sealing: Encryption) -> None:
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

    def list_files(self, folder: str) -> Iterator[FileInfo]:
        return self._inner.list_files(folder)

    def set_aside(self, path: str) -> None:
        self._inner.set_aside(path)

    def _closed(self, path: str, data: bytes) -> bytes:
        return self._sealing.closed(_tenant(path), data, path)


def _tenant(path: str) -> str:
    return path.split("/")[1]
