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
from larder.core.session_name import check_session_name as check_name
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
    record_from_dict,
    session_key,
)

EXPORT_KIND = "session_export"
MAX_TOKENS = 2**26
MAX_GROWTH = 4096  # of a cache by being decoded: no codec comes near it


class SessionExporter:
    """Export and import of sessions."""

    def __init__(self, parts: StoreComponents) -> None:
        self._parts = parts

    def export(self, record: Record) -> bytes:
        """Export a session as the bytes of a file.

        Raises:
            Damaged: a part of it is damaged; save the session again first.
        """
        own = {ref: self._parts.blobs.get(ref, record.tenant) for ref in set(record.refs)}
        named = {ref: BlobRef(digest_of(data), len(data)) for ref, data in own.items()}
        tensors = {named[ref].digest: _byte_tensor(data) for ref, data in own.items()}
        told = replace(
            record,
            tokens=named[record.tokens],
            spans=tuple(named[ref] for ref in record.spans),
            transcript=None if record.transcript is None else named[record.transcript],
            beside=None if record.beside is None else named[record.beside],
        )
        return pack_container(
            tensors, {"kind": EXPORT_KIND, "record": canonical_json(asdict(told))}
        )

    def take_in(self, data: bytes, principal: str, name: str) -> Record:
        """Import a session from a file that `export` wrote.

        Raises:
            InputError: the file is not an export, or the name is invalid or taken.
            Refused: it is of another version.
            BudgetError, StoreError: it cannot be stored.
        """
        check_name(name)
        tenant = self._parts.tenant(principal)
        session = session_key(tenant, name)
        record, ids, blobs = _parse_export(data)
        newest = self._parts.heads.newest(tenant, session)
        if newest is not None and not newest.removed:
            raise InputError(f"There is a session {name!r} already: take another name.")
        number = self._parts.heads.before(tenant, newest, None)
        shelves = self._parts.blobs
        with shelves.reserve_metadata(len(record.spans)), shelves.saving(tenant) as saving:
            spans = tuple(_change_tenant(saving, blobs[ref.digest], tenant) for ref in record.spans)
            own = {"tenant": tenant, "session": session, "name": name, "previous": number}
            made = replace(
                record,
                **own,
                epoch=number + 1,
                spans=spans,
                tokens=saving.put(encode_token_log(ids, tenant, session)),
                transcript=_change_owner(saving, blobs, record.transcript, record, tenant, session),
                beside=_change_owner(saving, blobs, record.beside, record, tenant),
                made=self._parts.clock(),
                labels=record.labels
                if name == record.name
                else {**record.labels, ROOT_LABEL: name},
            )
            self._parts.branches.note(made)
            with saving.commit_record():
                self._parts.heads.commit(made, number, is_new=True)
        return made


def _parse_export(data: bytes) -> tuple[Record, tuple[int, ...], dict[str, bytes]]:
    """Record, token ids and verified blobs of an exported file.

    Raises:
        InputError: the file is not an export, or is damaged.
        Refused: it is of another version.
    """
    try:
        tensors, told = unpack_container(data)
        if told.get("kind") != EXPORT_KIND or not isinstance(told.get("record"), str):
            raise Damaged("The container is a saved cache, not an exported session.")
        record = _parse_record(parse_json(told["record"]))
        blobs = {ref.digest: _blob(tensors, ref) for ref in record.refs}
        log, own = blobs[record.tokens.digest], (record.tenant, record.session)
        ids = decode_token_log(log, record.num_tokens, *own)
    except Damaged as error:
        raise InputError(f"The file is not an exported session, or is damaged: {error}") from error
    return record, ids, blobs


def _parse_record(told: Any) -> Record:
    if not isinstance(told, dict) or told.get("schema") != RECORD_SCHEMA:
        raise Refused("The exported session was written by another larder.", "format")
    try:
        record = record_from_dict(told)
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged("The record lacks a field.") from error
    _check_record(record)
    return record


def _check_record(record: Record) -> None:
    """Check the field types of a foreign record. Raises: Damaged."""
    counts = [record.num_tokens, record.cache_bytes, record.cache_tokens]
    counts += [ref.bytes for ref in record.refs]
    counts += [count for held in record.others for count in (held.num_spans, held.cache_bytes)]
    if record.removed or not all(type(count) is int and 0 <= count < 2**62 for count in counts):
        raise Damaged("The record has invalid counts.")
    if record.num_tokens > MAX_TOKENS or record.cache_bytes > MAX_GROWTH * (
        1 + sum(ref.bytes for ref in record.spans)
    ):
        raise Damaged("The record claims more tokens or bytes than its parts can hold.")
    if sum(held.num_spans for held in record.others) > len(record.spans):
        raise Damaged("The record claims more parts than there are.")
    if record.cache_tokens > record.num_tokens:
        raise Damaged("The caches have read more tokens than the log has.")
    texts = [record.tenant, record.session, record.name, record.policy, record.codec]
    texts += [record.cache_prefix, *(ref.digest for ref in record.refs)]
    told = [record.identity, record.cache, record.labels, *(held.cache for held in record.others)]
    for mapping in told:
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


def _change_tenant(saving: BlobTransaction, data: bytes, tenant: str) -> BlobRef:
    """Rewrite a cache blob for a new tenant.

    Raises:
        InputError: it holds no part of a cache.
    """
    try:
        tensors, told = unpack_container(data)
    except LarderError as error:
        raise InputError(f"A part of the exported session cannot be used: {error}") from error
    if told.get("kind") not in (CHUNK_KIND, SNAPSHOT_KIND):
        raise InputError("A part of the exported session is not part of a cache.")
    return saving.put(pack_container(tensors, told | {"tenant": tenant}))


def _change_owner(
    saving: BlobTransaction,
    blobs: Mapping[str, bytes],
    ref: BlobRef | None,
    record: Record,
    *heir: str,
) -> BlobRef | None:
    """Rewrite a blob that is not a cache for a new tenant or session; None stays None."""
    if ref is None:
        return None
    return saving.put(
        add_owner(strip_owner(blobs[ref.digest], record.tenant, record.session), *heir)
    )


def _byte_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
