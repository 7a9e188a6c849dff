"""How what is kept is hidden from whoever has the disk: by AES-GCM, or not at all.

Each tenant has keys of its own, derived from the operator's key by HKDF-SHA256 with the store's
salt. The nonce of a blob is a digest of it under another of these keys: equal bytes of one tenant
are one blob, equal bytes of two tenants are two, and a nonce comes back only with its own bytes.
Blobs are called by the digest of what lies on the disk, so damage is found without any key.

What is not hidden: how many sessions and tenants there are, when they are used, how large they are,
and by which beginnings texts of one tenant agree.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from larder.core.errors import Damaged, DependencyError, InputError, StoreError
from larder.store.digests import mac_of

KEY_VARIABLE = "LARDER_STORE_KEY"
KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
MASKED_TOKEN_BYTES = 4  # of a token in the index of chunks
MAX_CACHED_TENANTS = 4096  # whose keys are remembered


class Encryption(ABC):
    """Encryption of blobs and records per tenant. Safe from threads.

    `is_encrypted` tells whether it does: whether nobody without the key can make what opens.
    """

    is_encrypted: ClassVar[bool]

    @abstractmethod
    def closed(self, tenant: str, data: bytes, place: str = "") -> bytes:
        """Encrypt bytes deterministically for a tenant and path."""

    @abstractmethod
    def opened(self, tenant: str, data: bytes, place: str = "") -> bytes:
        """Decrypt bytes.

        Raises:
            Damaged: they are not what was closed for this tenant and place.
        """

    @abstractmethod
    def tag(self, tenant: str, digest: str) -> str:
        """Keyed digest of content that may be stored in the clear."""

    @abstractmethod
    def masked(self, tenant: str, before: str, tokens: bytes) -> bytes:
        """Encrypt tokens for the index so that equal prefixes stay equal up to their difference.

        Args:
            before: digest of the text in front of them.
            tokens: four bytes each.
        """


class NoEncryption(Encryption):
    """Null encryption: bytes are stored as they are."""

    is_encrypted = False

    def closed(self, tenant: str, data: bytes, place: str = "") -> bytes:
        return data

    def opened(self, tenant: str, data: bytes, place: str = "") -> bytes:
        return data

    def tag(self, tenant: str, digest: str) -> str:
        return digest

    def masked(self, tenant: str, before: str, tokens: bytes) -> bytes:
        return tokens


class AesGcmEncryption(Encryption):
    """AES-GCM under keys derived from the operator's key.

    Args:
        key: `KEY_BYTES` or more that nobody can guess.
        salt: of the store; no secret.

    Raises:
        DependencyError: the package `cryptography` is missing.
    """

    is_encrypted = True

    def __init__(self, key: bytes, salt: bytes) -> None:
        _ciphers()
        self._key, self._salt = key, salt
        self._keys = lru_cache(MAX_CACHED_TENANTS)(self._derived)

    def closed(self, tenant: str, data: bytes, place: str = "") -> bytes:
        cipher, naming, _ = self._keys(tenant)
        nonce = hmac.digest(naming, f"{len(place)}:{place}".encode() + data, "sha256")[:NONCE_BYTES]
        return nonce + cipher.encrypt(nonce, data, place.encode())

    def opened(self, tenant: str, data: bytes, place: str = "") -> bytes:
        cipher, *_ = self._keys(tenant)
        if len(data) >= NONCE_BYTES + TAG_BYTES:
            nonce, hidden = data[:NONCE_BYTES], data[NONCE_BYTES:]
            try:
                return cipher.decrypt(nonce, hidden, place.encode())
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


def encryption_for(key: bytes | None, what: str) -> Encryption:
    """Encryption for data beside the store; without a key it is `NoEncryption`."""
    return NoEncryption() if key is None else AesGcmEncryption(key, f"larder {what}".encode())


def read_key(path: Path | None) -> bytes | None:
    """Operator's key from a file, else from `$LARDER_STORE_KEY`; None if neither is set.

    Raises:
        InputError: it is none.
    """
    told = os.environ.get(KEY_VARIABLE, "")
    if path is None:
        return (
            _parse_key(told.encode("utf-8", "surrogateescape"), f"${KEY_VARIABLE}")
            if told
            else None
        )
    try:
        return _parse_key(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read as a key ({error.strerror}).") from error


def fingerprint_of(key: bytes) -> str:
    """Fingerprint of a key, from which the key cannot be derived."""
    return hashlib.sha256(b"larder store key" + key).hexdigest()[:16]


def _parse_key(told: bytes, where: str) -> bytes:
    """Key from hexadecimal digits or raw bytes."""
    text = told.strip()
    if len(text) == 2 * KEY_BYTES:
        try:
            return bytes.fromhex(text.decode("ascii"))
        except ValueError:
            pass
    if len(told) == KEY_BYTES:
        return told
    raise InputError(
        f"{where} is no key: it must have {KEY_BYTES} random bytes, or {2 * KEY_BYTES} hexadecimal "
        f"digits, got {len(told)} bytes. 'openssl rand -out store.key {KEY_BYTES}' makes one."
    )


@lru_cache(1)
def _ciphers() -> _Ciphers:
    try:
        return _Ciphers()
    except ModuleNotFoundError as error:
        raise DependencyError(
            f"Encryption needs the package {error.name}: pip install 'larder[encrypt]'."
        ) from error


SECRET_FILE = "secret"
SECRET_BYTES = 32


def store_secret(home: Path) -> bytes:
    """Secret of a home folder, created on first use; its file is readable by the owner only.

    Raises:
        StoreError: the file is no secret.
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
            os.link(temporary, path)  # whoever comes second takes what the first has made
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
