"""A session as one file: to be carried elsewhere, or kept aside.

The file is a container like a blob. It holds the session's record and, under their digests, all of
its blobs. Whoever takes it in becomes its owner: blobs are spelled anew for the new tenant, after
each has been verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from larder.core.errors import Damaged, InputError, LarderError, Refused
from larder.core.session_name import check as check_name
from larder.store.blobs import Ref
from larder.store.container import canonical, pack, parsed, raw_bytes, unpack
from larder.store.digests import digest_of, same
from larder.store.envelopes import CHUNK, SNAPSHOT, disowned, ids_of, owned, token_log
from larder.store.parts import Parts
from larder.store.records import ROOT, SCHEMA, Record, session_key
from larder.store.records import told_record as record_of_told
from larder.store.shelves import Saving

EXPORT = "session_export"
MAX_TOKENS = 2**26
MAX_GROWTH = 4096  # of a cache by being decoded: no codec comes near it


class Exchange:
    """Sessions that leave and come."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def export(self, record: Record) -> bytes:
        """All of a session as the bytes of a file.

        Raises:
            Damaged: something of it is; save it anew first.
        """
        own = {ref: self._parts.vault.get(ref, record.tenant) for ref in set(record.refs)}
        named = {ref: Ref(digest_of(data), len(data)) for ref, data in own.items()}
        tensors = {named[ref].digest: _bytes(data) for ref, data in own.items()}
        told = replace(
            record,
            tokens=named[record.tokens],
            spans=tuple(named[ref] for ref in record.spans),
            transcript=None if record.transcript is None else named[record.transcript],
            beside=None if record.beside is None else named[record.beside],
        )
        return pack(tensors, {"kind": EXPORT, "record": canonical(asdict(told))})

    def take_in(self, data: bytes, principal: str, name: str) -> Record:
        """Make a session of a file that `export` wrote.

        Raises:
            InputError: it is none, or the name is none or taken.
            Refused: it is of another version.
            BudgetError, StoreError: it cannot be kept.
        """
        check_name(name)
        tenant = self._parts.tenant(principal)
        session = session_key(tenant, name)
        record, ids, blobs = _opened(data)
        newest = self._parts.heads.newest(tenant, session)
        if newest is not None and not newest.removed:
            raise InputError(f"There is a session {name!r} already: take another name.")
        number = self._parts.heads.before(tenant, newest, None)
        shelves = self._parts.shelves
        with shelves.indexing(len(record.spans)), shelves.saving(tenant) as saving:
            spans = tuple(_rehomed(saving, blobs[ref.digest], tenant) for ref in record.spans)
            own = {"tenant": tenant, "session": session, "name": name, "previous": number}
            made = replace(
                record,
                **own,
                epoch=number + 1,
                spans=spans,
                tokens=saving.put(token_log(ids, tenant, session)),
                transcript=_passed_on(saving, blobs, record.transcript, record, tenant, session),
                beside=_passed_on(saving, blobs, record.beside, record, tenant),
                made=self._parts.clock(),
                labels=record.labels if name == record.name else {**record.labels, ROOT: name},
            )
            self._parts.families.note(made)
            with saving.naming():
                self._parts.heads.commit(made, number, is_new=True)
        return made


def _opened(data: bytes) -> tuple[Record, tuple[int, ...], dict[str, bytes]]:
    """The record in an exported file, its tokens, and its blobs, verified.

    Raises:
        InputError: it is no such file, or a damaged one.
        Refused: it is of another version.
    """
    try:
        tensors, told = unpack(data)
        if told.get("kind") != EXPORT or not isinstance(told.get("record"), str):
            raise Damaged("It is a saved cache, but no exported session.")
        record = _record(parsed(told["record"]))
        blobs = {ref.digest: _blob(tensors, ref) for ref in record.refs}
        log, own = blobs[record.tokens.digest], (record.tenant, record.session)
        ids = ids_of(log, record.num_tokens, *own)
    except Damaged as error:
        raise InputError(
            f"This is no session that larder has exported, or a damaged one: {error}"
        ) from error
    return record, ids, blobs


def _record(told: Any) -> Record:
    if not isinstance(told, dict) or told.get("schema") != SCHEMA:
        raise Refused("The exported session was written by another larder.", "format")
    try:
        record = record_of_told(told)
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged("Its record lacks something.") from error
    _check(record)
    return record


def _check(record: Record) -> None:
    """Raises: Damaged: somebody else has made the record, and its fields are of other kinds."""
    counts = [record.num_tokens, record.cache_bytes, record.cache_tokens]
    counts += [ref.bytes for ref in record.refs]
    counts += [count for held in record.others for count in (held.num_spans, held.cache_bytes)]
    if record.removed or not all(type(count) is int and 0 <= count < 2**62 for count in counts):
        raise Damaged("Its record has counts that are none.")
    if record.num_tokens > MAX_TOKENS or record.cache_bytes > MAX_GROWTH * (
        1 + sum(ref.bytes for ref in record.spans)
    ):
        raise Damaged("Its record tells of more than its parts can hold.")
    if sum(held.num_spans for held in record.others) > len(record.spans):
        raise Damaged("Its record tells of more parts than there are.")
    if record.cache_tokens > record.num_tokens:
        raise Damaged("Its caches have read more tokens than there are.")
    texts = [record.tenant, record.session, record.name, record.policy, record.codec]
    texts += [record.cache_prefix, *(ref.digest for ref in record.refs)]
    told = [record.identity, record.cache, record.labels, *(held.cache for held in record.others)]
    for mapping in told:
        if not isinstance(mapping, Mapping):
            raise Damaged("Its record has lists that are none.")
        texts += [*mapping.keys(), *mapping.values()]
    if not all(isinstance(text, str) for text in texts) or type(record.lossless) is not bool:
        raise Damaged("Its record has texts that are none.")


def _blob(tensors: Mapping[str, Tensor], ref: Ref) -> bytes:
    tensor = tensors.get(ref.digest)
    if tensor is None or tensor.dtype is not torch.uint8:
        raise Damaged("A blob is missing.")
    data = bytes(raw_bytes(tensor))
    if not same(digest_of(data), ref.digest):
        raise Damaged("A blob does not match its digest.")
    return data


def _rehomed(saving: Saving, data: bytes, tenant: str) -> Ref:
    """The same blob, told to be the new tenant's.

    Raises:
        InputError: it holds no part of a cache.
    """
    try:
        tensors, told = unpack(data)
    except LarderError as error:
        raise InputError(f"A part of the exported session cannot be used: {error}") from error
    if told.get("kind") not in (CHUNK, SNAPSHOT):
        raise InputError("A part of the exported session is none of a cache.")
    return saving.put(pack(tensors, told | {"tenant": tenant}))


def _passed_on(
    saving: Saving, blobs: Mapping[str, bytes], ref: Ref | None, record: Record, *heir: str
) -> Ref | None:
    """A blob that is no cache's, as the new tenant's, or session's; None of none."""
    if ref is None:
        return None
    return saving.put(owned(disowned(blobs[ref.digest], record.tenant, record.session), *heir))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
