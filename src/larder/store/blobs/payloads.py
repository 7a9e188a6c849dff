"""Payloads of blobs: token logs, prefix chunks and snapshot parts, each with its owner.

Every blob names its owner, and a cache blob the model that made it. A blob opens for its owner
alone, so that tenants never share blobs, and a tenant cannot find out whether another has the same
text.

Token logs and transcripts are owned by one session, since no machine knows what the sessions of
another need. Cache blobs are shared inside a tenant: a lost one is prefilled again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

import larder
from larder.core.errors import Damaged, Refused
from larder.core.spec import ModelSpec
from larder.store.blobs.cache_state import RAW_CODEC, decode_state, encode_state
from larder.store.blobs.container import compress, decompress, pack_container, unpack_container
from larder.store.codecs.base import codec_named
from larder.store.digests import key_of
from larder.store.model_identity import ModelIdentity

CHUNK_KIND, SNAPSHOT_KIND = "prefix_chunk", "session_snapshot"
_ID_BYTES = 4


def add_owner(data: bytes, *owner: str) -> bytes:
    """Prefix bytes with the owner: a tenant, or a session of a tenant."""
    return _owner_prefix(owner) + data


def strip_owner(data: bytes, tenant: str, *session: str) -> bytes:
    """Verify and strip the owner prefix; a session may also read blobs owned by its tenant alone.

    Raises:
        Refused: they have another owner.
    """
    for owner in ((tenant, *session), (tenant,)):
        spelled = _owner_prefix(owner)
        if data[: len(spelled)] == spelled:
            return data[len(spelled) :]
    raise Refused("The blob belongs to another tenant or session.", "tenant")


def encode_token_log(ids: Sequence[int], tenant: str, session: str) -> bytes:
    """Encode token ids as a blob owned by a session."""
    return add_owner(compress(np.asarray(ids, dtype="<i4").tobytes()), tenant, session)


def decode_token_log(data: bytes, count: int, tenant: str, session: str) -> tuple[int, ...]:
    """Decode a token log of `count` ids.

    Raises:
        Damaged: it is no log of `count` ids.
        Refused: it has another owner.
    """
    log = decompress(strip_owner(data, tenant, session), _ID_BYTES * count)
    ids = np.frombuffer(log, dtype="<i4")
    if len(ids) and int(ids.min()) < 0:
        raise Damaged("A token log has ids below 0.")
    return tuple(ids.tolist())


def encode_chunk(
    tensors: Mapping[str, Tensor], tenant: str, identity: ModelIdentity, span: Mapping[str, Any]
) -> bytes:
    """Encode keys and values of a prefix chunk, shared inside a tenant.

    Args:
        span: `start`, `n_tokens`, `tokens` and `prefix`, the digest of the text up to its end.
    """
    return pack_container(tensors, _metadata(CHUNK_KIND, tenant, identity) | {"span": dict(span)})


def encode_snapshot(
    state: Mapping[str, Tensor],
    tenant: str,
    identity: ModelIdentity,
    policy: str,
    codec: str,
    spec: ModelSpec,
    span: Mapping[str, Any] | None = None,
) -> bytes:
    """Encode a part of a session's cache with a codec.

    Args:
        spec: of the model.
        span: place of a chunk in the text; None for a part of all tokens.
    """
    tensors, coded = encode_state(state, codec_named(codec), codec, spec)
    metadata = _metadata(SNAPSHOT_KIND, tenant, identity)
    metadata |= {"policy": {"name": policy}, "coded": coded}
    metadata["codec"] = {"name": codec, "lossless": codec_named(codec).lossless}
    metadata |= {} if span is None else {"span": dict(span)}
    return pack_container(tensors, metadata)


def decode_cache_blob(
    data: bytes, kind: str, tenant: str, identity: ModelIdentity, max_bytes: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Decode a blob of a cache; return its tensors and metadata.

    Args:
        max_bytes: limit of the decoded tensors.

    Raises:
        Damaged: it is damaged.
        Refused: it is another tenant's or model's, or of another kind.
    """
    tensors, metadata = unpack_container(data)
    if metadata.get("kind") != kind:
        raise Refused(f"The blob is a {metadata.get('kind')}, not a {kind}.", "kind")
    if metadata.get("tenant") != tenant:
        raise Refused("A saved cache is another tenant's.", "tenant")
    if metadata.get("identity") != identity.key:
        raise Refused("A saved cache was made by another model.", "identity")
    coded = metadata.get("coded", {})
    if not isinstance(coded, dict):
        raise Damaged("A saved cache lacks its codec metadata.")
    return decode_state(tensors, coded, max_bytes), metadata


def is_lossless_codec(codec: str) -> bool:
    """True if decoded caches are bitwise equal."""
    return codec == RAW_CODEC or codec_named(codec).lossless


def _owner_prefix(owner: Sequence[str]) -> bytes:
    return bytes.fromhex(key_of("owner", *owner))


def _metadata(kind: str, tenant: str, identity: ModelIdentity) -> dict[str, Any]:
    """Metadata common to all cache blobs. No timestamps: equal content gives equal bytes."""
    return {
        "kind": kind,
        "tenant": tenant,
        "identity": identity.key,
        "model": identity.to_dict(),
        "writer": f"larder/{larder.__version__}",
    }
