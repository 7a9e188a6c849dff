"""Encryption of stored data by AES-GCM, or none.

Keys are derived per tenant from the operator's key by HKDF-SHA256 with the store's salt. The nonce
of a blob is a digest of its content under a second derived key: equal bytes of one tenant are one
blob, equal bytes of two tenants are two, and a nonce repeats only with the same bytes. Blobs are
named by the digest of the encrypted bytes, so damage is found without a key.

Not hidden: the number of sessions and tenants, the times of their use, their sizes, and which
prefixes the texts of one tenant share.
"""

from __future__ import annotations

import hmac
import os
import secrets
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from larder.core.errors import Damaged, DependencyError, InputError, StoreError
from larder.store.digests import canonical_json, mac_of, parse_json

if TYPE_CHECKING:
    from larder.store.fs.base import FileSystem
    from larder.store.fs.deadline import DeadlineExecutor

KEY_VARIABLE = "LARDER_STORE_KEY"
KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
MASKED_TOKEN_BYTES = 4  # of a token in the index of chunks
MAX_CACHED_TENANTS = 4096  # tenants whose derived keys are cached
SECRET_FILE = "secret"
SECRET_BYTES = 32
RECORD_FOLDERS = ("sessions", "chunks")  # of which a store in use has one
CHECK_PLAINTEXT = b"larder store"
CHECK_TENANT = "nobody"  # owner of the check, in place of a tenant id


class Encryption(ABC):
    """Encryption of blobs and records per tenant. Safe from threads.

    `is_encrypted` is true if only holders of the key can produce data that `decrypt` accepts.
    """

    is_encrypted: ClassVar[bool]

    @abstractmethod
    def encrypt(self, tenant: str, data: bytes, path: str = "") -> bytes:
        """Encrypt bytes deterministically for a tenant and path."""

    @abstractmethod
    def decrypt(self, tenant: str, data: bytes, path: str = "") -> bytes:
        """Decrypt bytes.

        Raises:
            Damaged: they were not encrypted for this tenant and path.
        """

    @abstractmethod
    def tag(self, tenant: str, digest: str) -> str:
        """Keyed digest of content that may be stored in the clear."""

    @abstractmethod
    def masked(self, tenant: str, before: str, tokens: bytes) -> bytes:
        """Encrypt tokens for the index so that equal prefixes stay equal up to their difference.

        Args:
            before: digest of the text before them.
            tokens: four bytes each.
        """


class NoEncryption(Encryption):
    """Null encryption: bytes are stored as they are."""

    is_encrypted = False

    def encrypt(self, tenant: str, data: bytes, path: str = "") -> bytes:
        return data

    def decrypt(self, tenant: str, data: bytes, path: str = "") -> bytes:
        return data

    def tag(self, tenant: str, digest: str) -> str:
        return digest

    def masked(self, tenant: str, before: str, tokens: bytes) -> bytes:
        return tokens


class AesGcmEncryption(Encryption):
    """AES-GCM under keys derived from the operator's key.

    Args:
        key: `KEY_BYTES` or more random bytes.
        salt: of the store; not secret.

    Raises:
        DependencyError: the package `cryptography` is missing.
    """

    is_encrypted = True

    def __init__(self, key: bytes, salt: bytes) -> None:
        _ciphers()
        self._key, self._salt = key, salt
        self._keys = lru_cache(MAX_CACHED_TENANTS)(self._derived)

    def encrypt(self, tenant: str, data: bytes, path: str = "") -> bytes:
        cipher, naming, _ = self._keys(tenant)
        nonce = hmac.digest(naming, f"{len(path)}:{path}".encode() + data, "sha256")[:NONCE_BYTES]
        return nonce + cipher.encrypt(nonce, data, path.encode())

    def decrypt(self, tenant: str, data: bytes, path: str = "") -> bytes:
        cipher, *_ = self._keys(tenant)
        if len(data) >= NONCE_BYTES + TAG_BYTES:
            nonce, hidden = data[:NONCE_BYTES], data[NONCE_BYTES:]
            try:
                return cipher.decrypt(nonce, hidden, path.encode())
            except _ciphers().InvalidTag:
                pass
        raise Damaged(
            "Stored bytes do not open with this key: they are damaged, another tenant's, or were "
            "written with another key."
        )

    def tag(self, tenant: str, digest: str) -> str:
        return mac_of(self._keys(tenant)[2], digest)

    def masked(self, tenant: str, before: str, tokens: bytes) -> bytes:
        from blake3 import blake3

        rolling = blake3(key=self._keys(tenant)[2]).update(before.encode())
        words: list[bytes] = []
        for start in range(0, len(tokens), MASKED_TOKEN_BYTES):
            rolling.update(tokens[start : start + MASKED_TOKEN_BYTES])
            words.append(rolling.digest(length=MASKED_TOKEN_BYTES))
        return b"".join(words)

    def _derived(self, tenant: str) -> tuple[Any, bytes, bytes]:
        """Derived keys of a tenant: cipher, nonce key and tag key."""
        ciphers = _ciphers()
        info = f"larder store 1 {tenant}".encode()
        made = ciphers.HKDF(ciphers.SHA256(), 3 * KEY_BYTES, self._salt, info).derive(self._key)
        first, second, third = (made[n * KEY_BYTES : (n + 1) * KEY_BYTES] for n in range(3))
        return ciphers.AESGCM(first), second, third


class _Ciphers:
    """Primitives of the package `cryptography`."""

    def __init__(self) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self.InvalidTag, self.AESGCM, self.SHA256, self.HKDF = InvalidTag, AESGCM, SHA256, HKDF


def encryption_for(key: bytes | None, owner: str) -> Encryption:
    """Encryption for data beside the store; without a key it is `NoEncryption`."""
    return NoEncryption() if key is None else AesGcmEncryption(key, f"larder {owner}".encode())


def read_key(path: Path | None) -> bytes | None:
    """Operator's key from a file, else from `$LARDER_STORE_KEY`; None if neither is set.

    Raises:
        InputError: it is no key.
    """
    if path is None:
        text = os.environ.get(KEY_VARIABLE, "")
        data = text.encode("utf-8", "surrogateescape")
        return _parse_key(data, f"${KEY_VARIABLE}") if text else None
    try:
        return _parse_key(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read as a key ({error.strerror}): name a file that has 32 random "
            "bytes, or 64 hexadecimal digits."
        ) from error


def _parse_key(data: bytes, source: str) -> bytes:
    """Key from hexadecimal digits or raw bytes."""
    text = data.strip()
    if len(text) == 2 * KEY_BYTES:
        try:
            return bytes.fromhex(text.decode("ascii"))
        except ValueError:
            pass
    if len(data) == KEY_BYTES:
        return data
    raise InputError(
        f"{source} is no key: it must have {KEY_BYTES} random bytes, or {2 * KEY_BYTES} "
        f"hexadecimal digits, got {len(data)} bytes. 'openssl rand -out store.key {KEY_BYTES}' "
        "makes one."
    )


@lru_cache(1)
def _ciphers() -> _Ciphers:
    try:
        return _Ciphers()
    except ModuleNotFoundError as error:
        raise DependencyError(
            f"Encryption needs the package {error.name}: pip install 'larder[encrypt]'."
        ) from error


def store_secret(home: Path) -> bytes:
    """Secret of a home folder, created on first use; its file is readable by the owner only.

    Raises:
        StoreError: the file is not a secret.
    """
    path = home / SECRET_FILE
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        temporary = home / f".{SECRET_FILE}-{os.getpid()}-{secrets.token_hex(4)}"
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # a process that comes second takes the first one's
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    found = path.read_bytes()
    if len(found) != SECRET_BYTES:
        raise StoreError(
            f"{path} has {len(found)} bytes instead of {SECRET_BYTES}: restore the file, or set "
            "another LARDER_HOME; saved sessions cannot be read without it."
        )
    return found


KEY_PATH, KEY_FILE_VERSION = "key.json", 1  # version, salt and check of a store under a key


def open_encryption(
    file_system: FileSystem, executor: DeadlineExecutor, key: bytes | None
) -> Encryption:
    """Open the encryption of a store; an empty store is initialized with the key, or without one.

    Raises:
        StoreError: it was created with another key, with a key and none is given, or without one.
    """
    try:
        found = executor.call(file_system.read, KEY_PATH)
    except FileNotFoundError:
        return NoEncryption() if key is None else _create_key_file(file_system, executor, key)
    if key is None:
        raise StoreError(
            f"The store at {file_system.url} is under a key: give --key-file FILE, or use another "
            "store."
        )
    return _verify_key(found, key, file_system.url)


def _create_key_file(file_system: FileSystem, executor: DeadlineExecutor, key: bytes) -> Encryption:
    if executor.call(_is_in_use, file_system):
        raise StoreError(
            f"The store at {file_system.url} was begun without a key: leave --key-file out, or "
            "take another store and carry sessions over by 'larder cache export' and 'import'."
        )
    salt = secrets.token_bytes(KEY_BYTES)
    encryption = AesGcmEncryption(key, salt)
    check = encryption.encrypt(CHECK_TENANT, CHECK_PLAINTEXT, KEY_PATH)
    fields = {"version": KEY_FILE_VERSION, "salt": salt.hex(), "check": check.hex()}
    try:
        executor.call(file_system.create, KEY_PATH, canonical_json(fields).encode())
    except FileExistsError:  # another process has created it meanwhile
        return _verify_key(executor.call(file_system.read, KEY_PATH), key, file_system.url)
    return encryption


def _verify_key(stored: bytes, key: bytes, url: str) -> Encryption:
    try:
        fields = parse_json(stored)
        version, salt = fields["version"], bytes.fromhex(fields["salt"])
        hidden = bytes.fromhex(fields["check"])
    except (Damaged, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{KEY_PATH} of the store at {url} is damaged: put it back from a copy; the store "
            "cannot be decrypted without it."
        ) from error
    if version != KEY_FILE_VERSION:
        raise StoreError(
            f"The store at {url} has a key file of a later version of larder: use that version."
        )
    encryption = AesGcmEncryption(key, salt)
    try:
        encryption.decrypt(CHECK_TENANT, hidden, KEY_PATH)
    except Damaged as error:
        raise StoreError(
            f"The store at {url} is under another key: give the key file that it was created with."
        ) from error
    return encryption


def _is_in_use(file_system: FileSystem) -> bool:
    return any(True for folder in RECORD_FOLDERS for _ in file_system.list_files(folder))
