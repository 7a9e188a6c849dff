"""Digests, keyed digests, tenant ids, and JSON documents sealed by a keyed digest."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Iterable
from typing import Any

from larder.core.errors import Damaged

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

    Without the secret, ids of principals cannot be computed or inverted.
    """
    return hmac.new(secret, principal.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


def is_digest(text: str) -> bool:
    """True if the text is spelled like a digest; nothing else becomes a path."""
    return _DIGEST.fullmatch(text) is not None


def digests_equal(left: str, right: str) -> bool:
    """Compare digests in constant time."""
    return hmac.compare_digest(left.encode(), right.encode())


def canonical_json(value: Any) -> str:
    """Canonical JSON: one spelling per content."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        Damaged: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"The metadata of a saved cache is not JSON ({error}).") from error


def sealed_json(secret: bytes, field: str, text: str, path: str = "") -> bytes:
    """JSON document that holds a text under `field`, and its seal.

    Args:
        path: path of the document, if it must not open at another.
    """
    return canonical_json({field: text, "seal": _seal(secret, text, path)}).encode()


def open_sealed_json(secret: bytes, field: str, data: bytes, path: str = "") -> str:
    """Text of a document of `sealed_json`.

    Raises:
        Damaged: it is no such document, was changed, or was sealed with another secret.
    """
    document = parse_json(data)
    if not isinstance(document, dict) or not isinstance(document.get(field), str):
        raise Damaged(f"The sealed {field} is not valid.")
    if not digests_equal(_seal(secret, document[field], path), str(document.get("seal"))):
        raise Damaged(
            f"The sealed {field} does not match its seal: it is damaged, or was written with "
            "another secret."
        )
    return document[field]


def _seal(secret: bytes, text: str, path: str) -> str:
    return mac_of(secret, path, text) if path else mac_of(secret, text)


def _length_prefixed(parts: Iterable[str | bytes]) -> Iterable[bytes]:
    """Each part after its length."""
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        yield len(data).to_bytes(8, "little") + data
