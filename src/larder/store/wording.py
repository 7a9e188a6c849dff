"""Token ids as bytes that can be ordered, compared and digested."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from larder.store.digests import key_of


def token_bytes(ids: Sequence[Any]) -> bytes:
    """Token ids as bytes whose order is that of the ids.

    Raises:
        OverflowError, TypeError, ValueError: they are none.
    """
    return np.asarray(ids, dtype=">u4").tobytes()


def token_ids_from_bytes(tokens: bytes) -> list[int]:
    """The token ids that `token_bytes` spelled."""
    return np.frombuffer(tokens, dtype=">u4").tolist()


def common_prefix_len(left: bytes, right: bytes) -> int:
    """How many tokens two texts have in common from their beginning."""
    pair = [np.frombuffer(each, dtype=">u4") for each in (left, right)]
    length = min(map(len, pair))
    differing = np.flatnonzero(pair[0][:length] != pair[1][:length])
    return int(differing[0]) if len(differing) else length


def chunk_key(tenant: str, identity: str, parent: str, tokens: bytes) -> str:
    """What a chunk is called beside the blobs."""
    return key_of("chunk", tenant, identity, parent, tokens)


def prefix_digest(ids: Sequence[int]) -> str:
    """Digest of a text, of another kind than keys: both would have to collide."""
    return hashlib.sha256(token_bytes(ids)).hexdigest()
