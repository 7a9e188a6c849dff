"""What is written down of a session at one point of its life: small, immutable, sealed.

    sessions/<tenant>/<session>/<epoch>.json

An epoch's file is created once and never changed: whoever creates it has written the session's
next state, and nobody else can. It is sealed with the store's secret, so that a flipped bit is
noticed as well as a record that somebody else has made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from larder.core.errors import Damaged, Refused
from larder.store.blobs.blob_store import BlobRef
from larder.store.digests import (
    canonical_json,
    is_digest,
    key_of,
    open_sealed_json,
    parse_json,
    sealed_json,
)

SESSIONS_FOLDER = "sessions"
RECORD_SCHEMA = 1
PINNED_LABEL, YES, NO = "pinned", "yes", "no"  # a label, and what it says
ROOT_LABEL = "root"  # the label of the session that a branch began as; of others their own name
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


@dataclass(frozen=True)
class StoredCache:
    """One cache of a session that has several.

    Args:
        cache: what `SequenceCache.meta` told.
        num_spans: blobs that hold it.
        cache_bytes: of its tensors, once they are decoded.
    """

    cache: Mapping[str, str]
    num_spans: int
    cache_bytes: int


@dataclass(frozen=True)
class Record:
    """Record of one epoch of a session.

    Args:
        tenant: whose it is, as `tenant_of` spells it.
        session: what it is called in paths, as `session_key` spells it.
        name: what it is called by people.
        epoch: 1 for the first state.
        previous: the epoch that it was made from; 0 for none.
        tokens: of every token that was read.
        num_tokens: how many they are.
        identity: what the cache depends on, by name; empty where there is none.
        policy: canonical spelling.
        codec: how keys and values are spelled in the spans.
        cache: what `SequenceCache.meta` told of the first; empty where only tokens are kept.
        spans: the blobs of all caches, in order.
        transcript: what was said as text, if that is kept, and what else who saves it needs.
        cache_bytes: of the tensors of all caches, once they are decoded.
        lossless: whether the cache comes back to the bit.
        made: seconds since 1970.
        removed: the session is gone; nobody can write a state behind this one.
        others: the caches behind the first, in order.
        cache_tokens: how many of the tokens the caches have read; 0 for all.
        cache_prefix: digest of those tokens, where they are not all.
        beside: what the caches do not say of their session, if who saves them has more to say.
        labels: what else who saves it wants to know without opening anything.
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
        own = (self.tokens,) if self.transcript is None else (self.tokens, self.transcript)
        return (*own, *self.cache_refs)

    @property
    def cache_refs(self) -> tuple[BlobRef, ...]:
        """Blobs of the caches and of the state beside them."""
        return self.spans if self.beside is None else (*self.spans, self.beside)

    @property
    def path(self) -> str:
        """Path of the record."""
        return record_path(self.tenant, self.session, self.epoch)

    @property
    def each(self) -> list[Record]:
        """One record per cache."""
        spans, count = len(self.spans), self.cache_bytes
        spans -= sum(held.num_spans for held in self.others)
        count -= sum(held.cache_bytes for held in self.others)
        found, start = list[Record](), 0
        for held in (StoredCache(self.cache, spans, count), *self.others):
            stop = start + held.num_spans
            own = {"cache": held.cache, "cache_bytes": held.cache_bytes, "others": ()}
            found.append(replace(self, spans=self.spans[start:stop], **own))
            start = stop
        return found

    @property
    def is_pinned(self) -> bool:
        """True if the session is pinned: its cache is evicted last."""
        return self.labels.get(PINNED_LABEL) == YES

    def without_cache(self) -> Record:
        """Copy with tokens and transcript alone."""
        bare = replace(self, spans=(), cache={}, identity={}, cache_bytes=0, others=())
        bare = replace(bare, cache_tokens=0, cache_prefix="", beside=None)
        return replace(bare, codec="", lossless=True)

    def replace_cache(self, other: Record) -> Record:
        """Copy with the cache of another record."""
        return replace(self, **{name: getattr(other, name) for name in CACHE_FIELDS})


def session_key(tenant: str, name: str) -> str:
    """Key of a session in paths: a digest of its name, which the caller has checked."""
    return key_of("session", tenant, name)


def record_path(tenant: str, session: str, epoch: int) -> str:
    """Path of the record of an epoch."""
    return f"{records_folder(tenant, session)}/{epoch}.json"


def records_folder(tenant: str, session: str) -> str:
    """Folder of the records of a session."""
    if not (is_digest(tenant) and is_digest(session)):
        raise Damaged("The key of a tenant or a session is no digest.")
    return f"{SESSIONS_FOLDER}/{tenant}/{session}"


def encode_record(record: Record, secret: bytes) -> bytes:
    """Encode and seal a record."""
    return sealed_json(secret, "record", canonical_json(asdict(record)))


def decode_record(data: bytes, secret: bytes) -> Record:
    """Verify and decode a record that `encode_record` wrote.

    Raises:
        Damaged: it is not what was written, or was written with another secret.
        Refused: it is of another schema.
    """
    fields = parse_json(open_sealed_json(secret, "record", data))
    if fields.get("schema") != RECORD_SCHEMA:
        raise Refused(
            f"The record of a session is of schema {str(fields.get('schema'))[:20]}, this larder "
            f"reads {RECORD_SCHEMA}: it is left as it is; use the version of larder that wrote it.",
            "format",
        )
    return record_from_dict(fields)


def record_from_dict(fields: Mapping[str, Any]) -> Record:
    """Record from a dictionary; keys of later versions are ignored."""
    known = {name: fields[name] for name in Record.__dataclass_fields__ if name in fields}
    known["tokens"] = BlobRef(**fields["tokens"])
    known["spans"] = tuple(BlobRef(**span) for span in fields["spans"])
    known["others"] = tuple(StoredCache(**cache) for cache in fields.get("others", ()))
    for name in ("transcript", "beside"):
        known[name] = None if fields.get(name) is None else BlobRef(**fields[name])
    return Record(**known)
