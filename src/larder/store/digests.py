"""Digests: what bytes are called, and by what somebody is known without a name."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_of(*parts: bytes | bytearray | memoryview) -> str:
    """Hexadecimal blake3 of the parts laid end to end."""
    from blake3 import blake3

    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def key_of(*parts: str | bytes) -> str:
    """Hexadecimal blake3 of a list: as no other list is spelled, however it is cut."""
    return digest_of(*_length_prefixed(parts))


def mac_of(secret: bytes, *parts: str | bytes) -> str:
    """As `key_of`, but only who knows the 32 bytes of the secret can make it."""
    from blake3 import blake3

    hasher = blake3(key=secret)
    for part in _length_prefixed(parts):
        hasher.update(part)
    return hasher.hexdigest()


def tenant_of(secret: bytes, principal: str) -> str:
    """What a principal is called in keys and paths: HMAC-SHA256 of its name.

    Who does not know the secret cannot make the key of somebody else, nor tell whose one is.
    """
    return hmac.new(secret, principal.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


def is_digest(text: str) -> bool:
    """Whether this is how digests are spelled; nothing else becomes a path."""
    return _DIGEST.fullmatch(text) is not None


def digests_equal(left: str, right: str) -> bool:
    """Compare digests in a time that tells nothing of where they differ."""
    return hmac.compare_digest(left.encode(), right.encode())


def _length_prefixed(parts: Iterable[str | bytes]) -> Iterable[bytes]:
    """Each part behind its length."""
    for part in parts:
        told = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        yield len(told).to_bytes(8, "little") + told
