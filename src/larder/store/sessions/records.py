"""Session records: the state of a session at one epoch, immutable and sealed.

    sessions/<tenant>/<session>/<epoch>.json

The file of an epoch is created once and never changed. Creating it commits the session's next
state, which only one writer can do. The seal is a digest keyed with the store's secret: it reveals
damage and forgery.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from larder.core.errors import Damaged
from larder.store.blobs.blob_store import BlobRef
from larder.store.digests import (
    canonical_json,
    is_digest,
    key_of,
    open_sealed_json,
    parse_json,
    sealed_json,
)
from larder.store.versions import StoredForm

SESSIONS_FOLDER = "sessions"
RECORD_SCHEMA = 1
RECORD_FORM = StoredForm("The record of a session", "schema", RECORD_SCHEMA)
PINNED_LABEL, YES, NO = "pinned", "yes", "no"  # a label and its values
ROOT_LABEL = "root"  # label: name of the session that a branch began as; otherwise the own name
CACHE_FIELDS = (
    "identity",
    "policy",
    "codec",
    "cache",
    "spans",
    "cache_bytes",
    "lossless",
    "others",
    "cache_tokens",
    "cache_prefix",
    "beside",
)


class SessionKey(NamedTuple):
    """Key of a session in paths and in the index.

    Args:
        tenant: tenant id, as `tenant_of` makes it.
        session: digest of the session's name.
    """

    tenant: str
    session: str

    @classmethod
    def named(cls, tenant: str, name: str) -> SessionKey:
        """Key of a tenant's session by its name, which the caller has checked."""
        return cls(tenant, key_of("session", tenant, name))

    @property
    def folder(self) -> str:
        """Folder of the session's records.

        Raises:
            Damaged: the key comes from damaged data.
        """
        if not (is_digest(self.tenant) and is_digest(self.session)):
            raise Damaged("The key of a tenant or a session is no digest.")
        return f"{SESSIONS_FOLDER}/{self.tenant}/{self.session}"

    def record_path(self, epoch: int) -> str:
        """Path of the record of an epoch."""
        return f"{self.folder}/{epoch}.json"


@dataclass(frozen=True)
class SessionTurn:
    """Session with its newest turn.

    Args:
        ids: every token of the conversation.
        transcript: the conversation, in the format of its owner.
        labels: as in `Record`.
    """

    ids: Sequence[int]
    transcript: bytes
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredCache:
    """One cache of a session that has several.

    Args:
        cache: metadata of `SequenceCache.meta`.
        num_spans: number of its blobs.
        cache_bytes: bytes of its decoded tensors.
    """

    cache: Mapping[str, str]
    num_spans: int
    cache_bytes: int


@dataclass(frozen=True)
class Record:
    """Record of one epoch of a session.

    Args:
        tenant, session: the session's key.
        name: the session's name.
        epoch: number of the state; 1 for the first.
        previous: epoch that the state follows; 0 for none.
        tokens: blob of the token log.
        num_tokens: length of the token log.
        identity: model identity that the caches depend on; empty without caches.
        policy: canonical spelling of the caches' policy.
        codec: name of the codec of keys and values.
        cache: metadata of the first cache; empty without caches.
        spans: blobs of all caches, in order.
        transcript: blob of the transcript, in the format of the session's owner.
        cache_bytes: bytes of the decoded tensors of all caches.
        lossless: whether the caches are restored bit by bit.
        made: seconds since 1970.
        removed: tombstone; no state can follow this one.
        others: caches after the first, in order.
        cache_tokens: number of tokens that the caches have read; 0 for all.
        cache_prefix: digest of those tokens, where they are not all.
        beside: blob of further state of the session that its caches do not hold.
        labels: metadata that is readable without opening a blob.
    """

    tenant: str
    session: str
    name: str
    epoch: int
    tokens: BlobRef
    num_tokens: int
    previous: int = 0
    identity: Mapping[str, str] = field(default_factory=dict)
    policy: str = ""
    codec: str = ""
    cache: Mapping[str, str] = field(default_factory=dict)
    spans: tuple[BlobRef, ...] = ()
    transcript: BlobRef | None = None
    cache_bytes: int = 0
    lossless: bool = True
    made: float = 0.0
    removed: bool = False
    others: tuple[StoredCache, ...] = ()
    cache_tokens: int = 0
    cache_prefix: str = ""
    beside: BlobRef | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    schema: int = RECORD_SCHEMA

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens that the caches have read; 0 without caches."""
        return (self.cache_tokens or self.num_tokens) if self.spans else 0

    @property
    def refs(self) -> tuple[BlobRef, ...]:
        """Every blob that the record refers to."""
        if self.removed:
            return ()
        texts = (self.tokens,) if self.transcript is None else (self.tokens, self.transcript)
        return (*texts, *self.cache_refs)

    @property
    def cache_refs(self) -> tuple[BlobRef, ...]:
        """Blobs of the caches and of the state beside them."""
        return self.spans if self.beside is None else (*self.spans, self.beside)

    @property
    def key(self) -> SessionKey:
        """Key of the session."""
        return SessionKey(self.tenant, self.session)

    @property
    def path(self) -> str:
        """Path of the record."""
        return self.key.record_path(self.epoch)

    @property
    def split_caches(self) -> list[Record]:
        """One record per cache."""
        spans, count = len(self.spans), self.cache_bytes
        spans -= sum(cache.num_spans for cache in self.others)
        count -= sum(cache.cache_bytes for cache in self.others)
        records, start = list[Record](), 0
        for each in (StoredCache(self.cache, spans, count), *self.others):
            stop = start + each.num_spans
            fields = {"cache": each.cache, "cache_bytes": each.cache_bytes, "others": ()}
            records.append(replace(self, spans=self.spans[start:stop], **fields))
            start = stop
        return records

    @property
    def is_pinned(self) -> bool:
        """True if the session is pinned: its cache is evicted last."""
        return self.labels.get(PINNED_LABEL) == YES

    def is_same_turn(self, other: Record) -> bool:
        """True if another record of the session is the same turn at the same epoch."""
        turn = (self.epoch, self.tokens, self.transcript)
        return turn == (other.epoch, other.tokens, other.transcript)

    def replace_cache(self, other: Record) -> Record:
        """Copy with the cache of another record."""
        return replace(self, **{name: getattr(other, name) for name in CACHE_FIELDS})


def encode_record(record: Record, secret: bytes) -> bytes:
    """Encode and seal a record."""
    return sealed_json(secret, "record", canonical_json(asdict(record)))


def decode_record(data: bytes, secret: bytes) -> Record:
    """Verify and decode a record that `encode_record` wrote.

    Raises:
        Damaged: it was changed, or sealed with another secret.
        Refused: it is of another schema.
    """
    fields = parse_json(open_sealed_json(secret, "record", data))
    if fields.get("schema") != RECORD_SCHEMA:
        raise RECORD_FORM.refusal(fields.get("schema"))
    return record_from_dict(fields)


def upgraded_record(data: bytes, secret: bytes) -> Record | None:
    """Record of an earlier schema, carried over; None if it is of the present one.

    Raises:
        Damaged: it was changed, or sealed with another secret.
        Refused: it cannot be carried over.
    """
    fields = parse_json(open_sealed_json(secret, "record", data))
    if fields.get("schema") == RECORD_SCHEMA:
        return None
    return record_from_dict(upgraded_record_fields(fields))


def upgraded_record_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a record of an earlier schema, carried over.

    Raises:
        Refused: they cannot be.
    """
    upgraded = RECORD_FORM.upgraded(dict(fields), fields.get("schema"))
    return {**upgraded, "schema": RECORD_SCHEMA}


def record_from_dict(fields: Mapping[str, Any]) -> Record:
    """Record from a dictionary; keys of later versions are ignored."""
    known = {name: fields[name] for name in Record.__dataclass_fields__ if name in fields}
    known["tokens"] = BlobRef(**fields["tokens"])
    known["spans"] = tuple(BlobRef(**span) for span in fields["spans"])
    known["others"] = tuple(StoredCache(**cache) for cache in fields.get("others", ()))
    for name in ("transcript", "beside"):
        known[name] = None if fields.get(name) is None else BlobRef(**fields[name])
    return Record(**known)
