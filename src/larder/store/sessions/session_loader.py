"""Loading of a session: its newest text, with the caches that fit or the reason why none does."""

from __future__ import annotations

from collections.abc import Sequence

from larder.core.errors import Damaged, LarderError, Refused
from larder.store.components import StoreComponents
from larder.store.ledger import Tier
from larder.store.sessions.chunk_stream import finest_bytes
from larder.store.sessions.records import Record, SessionKey
from larder.store.sessions.session_reader import CacheRequirements, LoadedSession
from larder.store.throughput import RestorePath


def load_session(
    parts: StoreComponents,
    key: SessionKey,
    name: str,
    requirements: CacheRequirements,
    ids: Sequence[int] | None,
) -> LoadedSession | None:
    """Session with its caches; None if there is none. What cannot be used is logged and counted.

    Args:
        name: of the session, for the error.
        ids: the text to continue, if known.

    Raises:
        Refused: the tokens cannot be read either.
    """
    try:
        record = parts.epochs.head(key)
        if record is None:
            return None
        known = parts.reader.ids(record)
        transcript = None if record.transcript is None else parts.reader.transcript(record)
    except LarderError as error:
        raise _unreadable(parts, name, error) from error
    try:
        _check(parts, record, known, requirements, ids)
        read = known[: record.num_cached_tokens]
        (cache, *others), levels, damage = parts.reader.caches(record, read, requirements)
        with parts.unwritten.suppressed():
            parts.manifest.used(key)
    except LarderError as error:
        reason = parts.refusals.note_error(error)
        return LoadedSession(record, known, transcript, None, reason)
    reason = "" if damage is None else parts.refusals.note_error(damage)
    return LoadedSession(record, known, transcript, cache, reason, tuple(others), levels)


def load_transcript(
    parts: StoreComponents, key: SessionKey, name: str
) -> tuple[Record, bytes] | None:
    """Newest state of a session and its transcript; None if there is none.

    Raises:
        Damaged: the transcript, or every record of the session, is damaged.
        Refused: it cannot be read for another reason, named in the error.
    """
    try:
        record = parts.epochs.head(key)
        if record is None or record.transcript is None:
            return None
        return record, parts.reader.transcript(record)
    except Damaged as error:
        parts.refusals.note_error(error)
        raise
    except LarderError as error:
        raise _unreadable(parts, name, error) from error


def has_cache(parts: StoreComponents, record: Record) -> bool:
    """True if a session has a cache that was not evicted."""
    return bool(record.spans) and not parts.blobs.index.is_evicted(record)


def cache_covers(parts: StoreComponents, record: Record, ids: Sequence[int]) -> bool:
    """True if a record's cache is present and covers the beginning of a text."""
    try:
        return has_cache(parts, record) and parts.reader.cache_covers(record, ids)
    except (Damaged, Refused) as error:
        parts.refusals.note_error(error)
        return False


def _unreadable(parts: StoreComponents, name: str, error: LarderError) -> Refused:
    reason = parts.refusals.note_error(error)
    return Refused(f"Session {name!r} cannot be read: {error}", reason)


def _check(
    parts: StoreComponents,
    record: Record,
    session_ids: Sequence[int],
    requirements: CacheRequirements,
    ids: Sequence[int] | None,
) -> None:
    """Check that a cache fits the request.

    Raises:
        Refused: it does not, or prefill is faster.
    """
    if not record.spans:
        raise Refused("The session was saved without a cache.", "tokens only")
    if not has_cache(parts, record):
        raise Refused("The cache was evicted.", "evicted")
    requirements.check(record, session_ids, ids)
    if requirements.decides_by_chunk(record):
        return
    stored, count = finest_bytes(record), record.num_cached_tokens
    if parts.throughput.choose(Tier.DISK, stored, count) is not RestorePath.LOAD:
        raise Refused("Prefill is faster than loading the cache.", "slower")
