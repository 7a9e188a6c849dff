"""Export and import of a session as one file.

The file is a container like a blob. It holds the session's record and, by digest, all of its blobs.
The importing tenant becomes the owner: each blob is verified, then rewritten for the new tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from larder.core.errors import Damaged, InputError, LarderError, Refused
from larder.core.session_name import check_session_name
from larder.store.blobs.blob_store import BlobRef
from larder.store.blobs.container import pack_container, raw_bytes, unpack_container
from larder.store.blobs.payloads import (
    CHUNK_KIND,
    SNAPSHOT_KIND,
    add_owner,
    decode_token_log,
    encode_token_log,
    strip_owner,
)
from larder.store.blobs.tenant_blobs import BlobTransaction
from larder.store.components import StoreComponents
from larder.store.digests import canonical_json, digest_of, digests_equal, parse_json
from larder.store.sessions.records import (
    RECORD_SCHEMA,
    ROOT_LABEL,
    Record,
    SessionKey,
    record_from_dict,
    upgraded_record_fields,
)

EXPORT_KIND = "session_export"
MAX_TOKENS = 2**26
MAX_GROWTH = 4096  # of a cache when decoded; no codec comes near it


def export_session(parts: StoreComponents, record: Record) -> bytes:
    """Export a session, as `SessionStore.export`."""
    blobs = {ref: parts.blobs.get(ref, record.tenant) for ref in set(record.refs)}
    # Blobs are exported decrypted, so that their digests differ from those of the store.
    refs = {ref: BlobRef(digest_of(data), len(data)) for ref, data in blobs.items()}
    tensors = {refs[ref].digest: _byte_tensor(data) for ref, data in blobs.items()}
    exported = replace(
        record,
        tokens=refs[record.tokens],
        spans=tuple(refs[ref] for ref in record.spans),
        transcript=None if record.transcript is None else refs[record.transcript],
        beside=None if record.beside is None else refs[record.beside],
    )
    return pack_container(
        tensors, {"kind": EXPORT_KIND, "record": canonical_json(asdict(exported))}
    )


def import_session(parts: StoreComponents, data: bytes, key: SessionKey, name: str) -> Record:
    """Import a session, as `SessionStore.import_file`."""
    check_session_name(name)
    tenant, session = key
    record, ids, blobs = _parse_export(data)
    previous = parts.epochs.free_epoch(key, name)
    is_renamed = name != record.name
    with parts.blobs.reserve_metadata(len(record.spans)), parts.blobs.saving(tenant) as transaction:
        imported = replace(
            record,
            tenant=tenant,
            session=session,
            name=name,
            epoch=previous + 1,
            previous=previous,
            spans=tuple(_change_tenant(transaction, blobs[ref.digest]) for ref in record.spans),
            tokens=transaction.put(encode_token_log(ids, tenant, session)),
            transcript=_change_owner(transaction, blobs, record, record.transcript, session),
            beside=_change_owner(transaction, blobs, record, record.beside),
            made=parts.clock(),
            labels={**record.labels, ROOT_LABEL: name} if is_renamed else record.labels,
        )
        parts.branches.note(imported)
        with transaction.commit_record():
            parts.epochs.commit(imported, previous, is_new=True)
    return imported


def _parse_export(data: bytes) -> tuple[Record, tuple[int, ...], dict[str, bytes]]:
    """Record, token ids and verified blobs of an exported file.

    Raises:
        InputError: the file is not an export, or is damaged.
        Refused: it is of another version.
    """
    try:
        tensors, metadata = unpack_container(data)
        if metadata.get("kind") != EXPORT_KIND or not isinstance(metadata.get("record"), str):
            raise Damaged("The container is a saved cache, not an exported session.")
        record = _parse_record(parse_json(metadata["record"]))
        blobs = {ref.digest: _blob(tensors, ref) for ref in record.refs}
        log = blobs[record.tokens.digest]
        ids = decode_token_log(log, record.num_tokens, record.tenant, record.session)
    except Damaged as error:
        raise InputError(f"The file is not an exported session, or is damaged: {error}") from error
    return record, ids, blobs


def _parse_record(fields: Any) -> Record:
    if not isinstance(fields, dict):
        raise Refused("The exported session was written by another larder.", "format")
    if fields.get("schema") != RECORD_SCHEMA:
        fields = upgraded_record_fields(fields)
    try:
        record = record_from_dict(fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged("The record lacks a field.") from error
    _check_record(record)
    return record


def _check_record(record: Record) -> None:
    """Check the field types of a foreign record.

    Raises:
        Damaged: a field has another type.
    """
    counts = [record.num_tokens, record.cache_bytes, record.cache_tokens]
    counts += [ref.bytes for ref in record.refs]
    for cache in record.others:
        counts += [cache.num_spans, cache.cache_bytes]
    if record.removed or not all(type(count) is int and 0 <= count < 2**62 for count in counts):
        raise Damaged("The record has invalid counts.")
    if record.num_tokens > MAX_TOKENS or record.cache_bytes > MAX_GROWTH * (
        1 + sum(ref.bytes for ref in record.spans)
    ):
        raise Damaged("The record claims more tokens or bytes than its parts can hold.")
    if sum(cache.num_spans for cache in record.others) > len(record.spans):
        raise Damaged("The record claims more parts than there are.")
    if record.cache_tokens > record.num_tokens:
        raise Damaged("The caches have read more tokens than the log has.")
    texts = [record.tenant, record.session, record.name, record.policy, record.codec]
    texts += [record.cache_prefix, *(ref.digest for ref in record.refs)]
    metadata = [record.identity, record.cache, record.labels]
    metadata += [cache.cache for cache in record.others]
    for mapping in metadata:
        if not isinstance(mapping, Mapping):
            raise Damaged("The record has invalid lists.")
        texts += [*mapping.keys(), *mapping.values()]
    if not all(isinstance(text, str) for text in texts) or type(record.lossless) is not bool:
        raise Damaged("The record has invalid strings.")


def _blob(tensors: Mapping[str, Tensor], ref: BlobRef) -> bytes:
    tensor = tensors.get(ref.digest)
    if tensor is None or tensor.dtype is not torch.uint8:
        raise Damaged("A blob is missing.")
    data = bytes(raw_bytes(tensor))
    if not digests_equal(digest_of(data), ref.digest):
        raise Damaged("A blob does not match its digest.")
    return data


def _change_tenant(transaction: BlobTransaction, data: bytes) -> BlobRef:
    """Rewrite a cache blob for a new tenant.

    Raises:
        InputError: it is no part of a cache.
    """
    try:
        tensors, metadata = unpack_container(data)
    except LarderError as error:
        raise InputError(f"A part of the exported session cannot be used: {error}") from error
    if metadata.get("kind") not in (CHUNK_KIND, SNAPSHOT_KIND):
        raise InputError("A part of the exported session is not part of a cache.")
    return transaction.put(pack_container(tensors, metadata | {"tenant": transaction.tenant}))


def _change_owner(
    transaction: BlobTransaction,
    blobs: Mapping[str, bytes],
    record: Record,
    ref: BlobRef | None,
    *session: str,
) -> BlobRef | None:
    """Rewrite a blob that is not a cache for a new tenant, or a session of it; None stays None."""
    if ref is None:
        return None
    data = strip_owner(blobs[ref.digest], record.tenant, record.session)
    return transaction.put(add_owner(data, transaction.tenant, *session))


def _byte_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
