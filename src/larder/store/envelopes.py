"""What the blobs of a store hold: logs of tokens, chunks, parts of snapshots; and who may read.

Every blob tells whose it is, and a blob of a cache what made it. It is read by nobody else,
whatever refers to it: that a blob is found does not mean that it is meant. So no two tenants ever
have a blob in common, and nobody sees by what is written whether another has said the same.

What a session cannot do without, its tokens and its transcript, is its own down to the bytes: of
two machines with one store neither knows what the other's sessions need. Caches may be shared: what
is gone of them is read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

import larder
from larder.core.errors import Damaged, Refused
from larder.store.codecs.base import codec_named
from larder.store.coding import RAW, coded, decoded, layer_of
from larder.store.container import pack, unpack
from larder.store.digests import key_of
from larder.store.identity import Identity
from larder.store.squeezing import released, squeezed

CHUNK, SNAPSHOT = "prefix_chunk", "session_snapshot"
_ID_BYTES = 4


def owned(data: bytes, *owner: str) -> bytes:
    """Bytes as the bytes of a blob of a tenant's, or of a tenant's session's."""
    return _spelled(owner) + data


def disowned(data: bytes, tenant: str, *session: str) -> bytes:
    """The bytes again; a session may also have what its tenant has, as earlier larders wrote it.

    Raises:
        Refused: they are somebody else's.
    """
    for owner in ((tenant, *session), (tenant,)):
        spelled = _spelled(owner)
        if data[: len(spelled)] == spelled:
            return data[len(spelled) :]
    raise Refused("What was kept is another tenant's.", "tenant")


def token_log(ids: Sequence[int], tenant: str, session: str) -> bytes:
    """Token ids as the bytes of a session's blob."""
    return owned(squeezed(np.asarray(ids, dtype="<i4").tobytes()), tenant, session)


def ids_of(data: bytes, count: int, tenant: str, session: str) -> tuple[int, ...]:
    """So many token ids again.

    Raises:
        Damaged: this is no log of so many.
        Refused: it is somebody else's.
    """
    told = released(disowned(data, tenant, session), _ID_BYTES * count)
    ids = np.frombuffer(told, dtype="<i4")
    if len(ids) and int(ids.min()) < 0:
        raise Damaged("A token log has ids below 0.")
    return tuple(ids.tolist())


def chunk_blob(
    tensors: Mapping[str, Tensor], tenant: str, identity: Identity, span: Mapping[str, Any]
) -> bytes:
    """Keys and values of some tokens, to be shared inside a tenant.

    Args:
        span: `start`, `n_tokens`, `tokens` and `prefix`, which says what they stand behind.
    """
    return pack(tensors, _told(CHUNK, tenant, identity) | {"span": dict(span)})


def snapshot_blob(
    state: Mapping[str, Tensor],
    tenant: str,
    identity: Identity,
    policy: str,
    codec: str,
    layers: int,
) -> bytes:
    """A part of a session's cache, in the spelling of a codec.

    Args:
        layers: that the model has.
    """
    tensors, how = coded(state, codec_named(codec), codec, layers)
    told = _told(SNAPSHOT, tenant, identity) | {"policy": {"name": policy}, "coded": how}
    told["codec"] = {"name": codec, "lossless": codec_named(codec).lossless}
    return pack(tensors, told)


def opened(
    data: bytes, kind: str, tenant: str, identity: Identity, max_bytes: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a blob, decoded, and what it tells.

    Args:
        max_bytes: that they may take.

    Raises:
        Damaged: it is not what was written.
        Refused: it is somebody else's, another model's, or of another kind.
    """
    tensors, told = unpack(data)
    if told.get("kind") != kind:
        raise Refused(f"A {told.get('kind')} stands where a {kind} should.", "kind")
    if told.get("tenant") != tenant:
        raise Refused("A saved cache is another tenant's.", "tenant")
    if told.get("identity") != identity.key:
        raise Refused("A saved cache was made by another model.", "identity")
    how = told.get("coded", {})
    if not isinstance(how, dict):
        raise Damaged("A saved cache does not tell how it is coded.")
    return decoded(tensors, how, max_bytes), told


def layers_in(state: Mapping[str, Tensor]) -> set[int]:
    """The layers that a part of a snapshot holds."""
    return {layer_of(name) for name in state}


def is_lossless(codec: str) -> bool:
    """Whether caches come back to the bit."""
    return codec == RAW or codec_named(codec).lossless


def _spelled(owner: Sequence[str]) -> bytes:
    return bytes.fromhex(key_of("owner", *owner))


def _told(kind: str, tenant: str, identity: Identity) -> dict[str, Any]:
    """What every blob tells. Nothing of when it was made: equal content must be equal bytes."""
    return {
        "kind": kind,
        "tenant": tenant,
        "identity": identity.key,
        "model": identity.told(),
        "writer": f"larder/{larder.__version__}",
    }
