"""Digests, keyed digests and tenant ids."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_of(*parts: bytes | bytearray | memoryview) -> str:
    """Hexadecimal blake3 of the concatenated parts."""
    from blake3 import blake3

    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def key_of(*parts: str | bytes) -> str:
    """Hexadecimal blake3 of a list, unambiguous in how it is split."""
    return digest_of(*_length_prefixed(parts))


def mac_of(secret: bytes, *parts: str | bytes) -> str:
    """Keyed `key_of`: only holders of the 32-byte secret can compute it."""
    from blake3 import blake3

    hasher = blake3(key=secret)
    for part in _length_prefixed(parts):
        hasher.update(part)
    return hasher.hexdigest()


def tenant_of(secret: bytes, principal: str) -> str:
    """Tenant id of a principal: HMAC-SHA256 of its name.

    Who does not know the secret cannot make the key of somebody else, nor tell whose one is.
    """
    return hmac.new(secret, principal.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


def is_digest(text: str) -> bool:
    """True if the text is spelled like a digest; nothing else becomes a path."""
    return _DIGEST.fullmatch(text) is not None


def digests_equal(left: str, right: str) -> bool:
    """Compare digests in constant time."""
    return hmac.compare_digest(left.encode(), right.encode())


def _length_prefixed(parts: Iterable[str | bytes]) -> Iterable[bytes]:
    """Each part after its length."""
    for part in parts:
        told = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        yield len(told).to_bytes(8, "little") + told
