"""Persistence in a store: each turn is written before the end of its answer is reported.

A thread of its own writes the token-exact transcripts, while other requests are answered. If the
store does not accept a turn, the future of `commit` has the error.
"""

from __future__ import annotations

import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from larder.core.errors import (
    BudgetError,
    Damaged,
    InputError,
    LarderError,
    Refused,
    StoreError,
    Superseded,
)
from larder.core.spec import ModelSpec
from larder.server.api_errors import session_superseded
from larder.server.persistence import session_file
from larder.server.persistence.base import (
    ANSWERED_LABEL,
    PAUSES_LABEL,
    WRITE_MARK_LABEL,
    SessionLocks,
    SessionPersistence,
    StoredSession,
)
from larder.server.request import ApiError, ChatMessage, SessionUnreadableError
from larder.server.session_info import SessionInfo, stored_session_info
from larder.server.session_state import SavedCache, SessionState
from larder.server.transcript import ASSISTANT, CompletedTurn
from larder.store.digests import mac_of
from larder.store.sessions.cache_writer import StagedCache
from larder.store.sessions.chunk_stream import bytes_at_once
from larder.store.sessions.records import NO, PINNED_LABEL, ROOT_LABEL, YES, Record, SessionTurn
from larder.store.store import Store

if TYPE_CHECKING:
    from larder.server.cluster.epoch_fence import EpochFence

FIRST_MESSAGES_LABEL = "first"  # label with the hash of the first messages
KEY_DIGITS = 16
ALL_MESSAGES_LABEL = "said"  # label with the hash of all messages
MODEL_LABEL = "model"  # label with the model's fingerprint
MARK_BYTES = 8
MAX_CANDIDATES = 8  # sessions compared with one request
# Writes a state behind an epoch, with labels to add.
StateWriter = Callable[[int, Mapping[str, str]], Record]


class StoreSessionPersistence(SessionPersistence):
    """Sessions in a store. `commit`, `remove` and `compact_history` are for the model's thread.

    Args:
        locks: of this server, where several share the store.
    """

    def __init__(
        self,
        store: Store,
        spec: ModelSpec,
        locks: SessionLocks = SessionLocks(),  # noqa: B008, without state
    ) -> None:
        self._store, self._fingerprint, self.locks = store, spec.fingerprint, locks
        self._pool = ThreadPoolExecutor(1, "larder writing")  # one thread keeps the order of turns
        self._names = defaultdict[str, SessionNameIndex](SessionNameIndex)  # by tenant
        self._names_lock = threading.Lock()
        self._damaged = set[tuple[str, str]]()  # sessions that may restart under their names

    def commit(
        self, session: SessionState, turn: CompletedTurn
    ) -> Future[LarderError | None] | None:
        self.locks.check(session)
        transcript = session_file.take_snapshot(session)
        extra_labels = {
            "epoch": str(session.transcript.epoch),
            PAUSES_LABEL: " ".join(map(str, session.usage.think_times)),
        }
        return self._pool.submit(
            self._write, session, transcript, session.transcript.ids, extra_labels
        )

    def attach(
        self, session: SessionState, prepared: StagedCache, labels: Mapping[str, str]
    ) -> Future[Record]:
        """Store a cache with its session. From any thread."""

        tenant, name = session.tenant, session.name

        def attached(epoch: int, mark: Mapping[str, str]) -> Record:
            return self._store.sessions.attach(tenant, name, prepared, epoch, {**labels, **mark})

        return self._pool.submit(self._write_state, session, attached)

    def load(self, tenant: str, name: str) -> StoredSession | None:
        """The session as last written; None if there is none.

        Raises:
            SessionUnreadableError: the stored transcript is damaged. A session restarted under its
                name replaces it.
            ApiError: 503 `session_unreadable`, it cannot be read now; answering without it could
                mix up sessions.
        """
        try:
            found = self._store.sessions.read_transcript(tenant, name)
            if found is None:  # removed, perhaps by another server, or evicted
                self._unindex(tenant, name)
                return None
            record, data = found
            kept = saved_cache(record) if self._store.sessions.has_cache(record) else None
        except Damaged as error:
            self._damaged.add((tenant, name))
            raise SessionUnreadableError(name) from error
        except (Refused, StoreError) as error:
            raise ApiError(
                f"Session {name!r} cannot be loaded now: try again; the server's log has "
                "the reason.",
                503,
                "session_unreadable",
            ) from error
        return StoredSession(data, record.epoch, kept, record.policy, record.labels)

    def candidates(self, tenant: str, turns: Sequence[ChatMessage]) -> Sequence[str]:
        firsts = list(self._message_hashes(turns))
        wholes = list(self._message_hashes(map(_stripped, turns)))
        with self._names_lock:
            index = self._names[tenant]
        try:
            index.load(lambda: self._keys_of(tenant))
        except LarderError:  # the next request tries again
            return ()
        return index.candidates(firsts, wholes, MAX_CANDIDATES)

    def branches(self, tenant: str, root: str) -> Sequence[str]:
        try:
            return self._store.sessions.branches(tenant, root)
        except StoreError as error:
            self._store.parts.unwritten.note_error(error)
            raise ApiError(
                f"The branches of session {root!r} cannot be listed now: try again; the server's "
                "log has the reason.",
                503,
                "session_unreadable",
            ) from error

    def list_sessions(self, tenant: str) -> Sequence[SessionInfo]:
        sessions = self._store.sessions
        return [
            stored_session_info(record, sessions.has_cache(record))
            for record in sessions.indexed_heads(tenant)
        ]

    def compact_history(self, tenant: str, name: str) -> None:
        self._store.sessions.compact(tenant, name)

    def pin(self, session: SessionState) -> Future[None] | None:
        return self._pool.submit(self._pin, session)

    def remove(self, session: SessionState) -> Future[None] | None:
        return self._pool.submit(self._remove, session)

    def discard(self, tenant: str, name: str) -> Future[None] | None:
        return self._pool.submit(self._discard, tenant, name)

    def close(self) -> None:
        self._pool.shutdown()

    def _write(
        self,
        session: SessionState,
        transcript: session_file.TranscriptSnapshot,
        ids: Sequence[int],
        extra_labels: Mapping[str, str],
    ) -> LarderError | None:
        """Write a session; the error that prevented it, or None.

        Raises:
            ApiError: 409 `session_superseded`.
        """
        durability = session.durability
        tenant, name = own = session.tenant, session.name
        *_, first = self._message_hashes(transcript.turns[0].messages)
        *_, whole = self._message_hashes(map(_stripped, _messages(transcript.turns)))
        labels = {
            **self._labels(session, transcript, first, whole),
            **extra_labels,
            PINNED_LABEL: YES if session.usage.is_pinned else NO,
        }
        data = session_file.encode(transcript, self._fingerprint)

        def appended(epoch: int, mark: Mapping[str, str]) -> Record:
            turn = SessionTurn(ids, data, {**labels, **mark})
            return self._store.sessions.append(tenant, name, turn, epoch)

        try:
            if not durability.epoch and own in self._damaged:
                durability.epoch = self._store.sessions.restart_epoch(tenant, name)
            self._write_state(session, appended)
            self._damaged.discard(own)
        except Superseded as error:
            durability.is_superseded = True
            raise session_superseded(session.name) from error
        except (BudgetError, StoreError) as error:
            self._store.parts.unwritten.note_error(error)
            return error
        durability.turns = len(transcript.turns)
        with self._names_lock:
            index = self._names.get(session.tenant)
        if index is not None:  # otherwise the index is loaded on first use
            index.add(session.name, first, whole)
        return None

    def _labels(
        self,
        session: SessionState,
        transcript: session_file.TranscriptSnapshot,
        first: str,
        whole: str,
    ) -> dict[str, str]:
        """Labels of a session that are known without reading it.

        Args:
            first, whole: hashes of the messages of the first turn, and of all.
        """
        return {
            FIRST_MESSAGES_LABEL: first,
            ALL_MESSAGES_LABEL: whole,
            MODEL_LABEL: self._fingerprint,
            ROOT_LABEL: transcript.root,
            "turns": str(sum(len(each.messages) + 1 for each in transcript.turns)),
            "made": str(session.identity.created),
            ANSWERED_LABEL: str(self._store.parts.clock()),
        }

    def _message_hashes(self, turns: Iterable[ChatMessage]) -> Iterator[str]:
        """A keyed hash of each prefix of some messages, unlinkable without the store's secret;
        matches are compared before use."""
        key = FIRST_MESSAGES_LABEL
        for turn in turns:
            key = mac_of(self._store.parts.secret, key, turn.role, turn.text)[:KEY_DIGITS]
            yield key

    def _pin(self, session: SessionState) -> None:
        """Write the pinned flag of a session.

        Raises:
            ApiError: 409 `session_superseded`, or 503 `session_unwritten`.
        """
        pinned = YES if session.usage.is_pinned else NO

        def labeled(epoch: int, mark: Mapping[str, str]) -> Record:
            return self._store.sessions.label(
                session.tenant, session.name, {PINNED_LABEL: pinned, **mark}, epoch
            )

        try:
            # Without a stored turn, the first one carries the flag.
            if session.durability.epoch or self._adopts_own_write(session):
                self._write_state(session, labeled)
        except Superseded as error:
            raise session_superseded(session.name) from error
        except (BudgetError, StoreError) as error:
            self._store.parts.unwritten.note_error(error)
            raise ApiError(
                f"The pinned flag of session {session.name!r} cannot be written now: try again; "
                "the server's log has the reason.",
                503,
                "session_unwritten",
            ) from error

    def _remove(self, session: SessionState) -> None:
        """Delete a session from the store and the name index.

        Raises:
            BudgetError, StoreError: the store has the session, or may have it.
        """
        try:
            self._remove_stored(session)
        except (BudgetError, StoreError) as error:
            if session.durability.epoch or session.durability.write_mark:
                raise
            self._store.parts.unwritten.note_error(error)
        self._unindex(session.tenant, session.name)

    def _write_state(self, session: SessionState, write: StateWriter) -> Record:
        """Write a session's next state.

        Raises:
            Superseded: another server has written the session since.
            BudgetError, StoreError: the state is not stored, or the outcome is unknown.
        """
        try:
            return _attempt(session, write)
        except Superseded:
            if not self._adopts_own_write(session):
                raise
        return _attempt(session, write)

    def _adopts_own_write(self, session: SessionState) -> bool:
        """True if the newest stored state is an own write whose outcome was unknown; it is adopted.

        Raises:
            StoreError: the store cannot be read.
        """
        return bool(session.durability.write_mark) and self._fence.adopts_own_write(session)

    def _remove_stored(self, session: SessionState) -> None:
        """Delete a session from the store.

        Raises:
            BudgetError, StoreError: the store may still have it.
        """
        try:
            self._store.sessions.remove(session.tenant, session.name)
        except Superseded:
            self._fence.remove(session)
        except InputError:  # not in the store, unless a write that timed out takes effect yet
            if session.durability.write_mark:
                self._fence.remove(session)

    @cached_property
    def _fence(self) -> EpochFence:
        """Fence, imported when another state is found than expected."""
        from larder.server.cluster.epoch_fence import EpochFence

        return EpochFence(self._store)

    def _discard(self, tenant: str, name: str) -> None:
        with suppress(InputError):  # removed already
            self._store.sessions.remove(tenant, name)
        self._unindex(tenant, name)

    def _unindex(self, tenant: str, name: str) -> None:
        with self._names_lock:
            index = self._names.get(tenant)
        if index is not None:
            index.remove(name)

    def _keys_of(self, tenant: str) -> Iterator[tuple[str, str, str]]:
        """Name and keys of a tenant's sessions of this model, most recently used last."""
        for each in reversed(self._store.sessions.indexed_heads(tenant)):
            labels = each.labels
            if labels.get(MODEL_LABEL, self._fingerprint) == self._fingerprint:
                first = labels.get(FIRST_MESSAGES_LABEL, "")
                yield each.name, first, labels.get(ALL_MESSAGES_LABEL, "")


def _attempt(session: SessionState, write: StateWriter) -> Record:
    """Write a state behind the expected epoch; its mark stays until the outcome is known."""
    durability = session.durability
    durability.write_mark = durability.write_mark or secrets.token_hex(MARK_BYTES)
    record = write(durability.epoch, {WRITE_MARK_LABEL: durability.write_mark})
    durability.epoch, durability.write_mark = record.epoch, ""
    return record


def _messages(turns: Sequence[CompletedTurn]) -> Iterator[ChatMessage]:
    for each in turns:
        yield from each.messages
        yield ChatMessage(ASSISTANT, each.text)


def _stripped(turn: ChatMessage) -> ChatMessage:
    """The message; of an assistant, without surrounding white space, which does not count in
    matches."""
    return replace(turn, text=turn.text.strip()) if turn.role == ASSISTANT else turn


def saved_cache(record: Record) -> SavedCache | None:
    """The cache that a record describes, if it has one."""
    if not record.spans:
        return None
    labels, tokens = record.labels, record.num_cached_tokens
    beside = 0 if record.beside is None else record.beside.bytes
    return SavedCache(
        tokens=tokens,
        settled_tokens=int(labels.get("settled", tokens)),
        entries=int(labels.get("entries", 0)),
        nbytes=sum(ref.bytes for ref in record.cache_refs),
        cache_bytes=record.cache_bytes,
        bytes_at_once=bytes_at_once(record) + beside,
        is_coded=labels.get("coded") == "yes",
        is_lossless=labels.get("whole") == "yes",
        caches=1 + len(record.others),
    )


class SessionNameIndex:
    """Names of stored sessions by two keys: of the first messages, and of the whole transcript.

    Safe from threads. The index is empty before `load`, which takes time linear in the number of
    sessions; concurrent changes are queued until it is done, without blocking their callers.
    """

    def __init__(self) -> None:
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._is_loaded = False
        self._changes: list[Callable[[], None]] | None = None  # changes during the load
        self._keys: dict[str, tuple[str, str]] = {}
        self._by_first: dict[str, dict[str, None]] = {}
        self._by_transcript: dict[str, dict[str, None]] = {}

    def load(self, read: Callable[[], Iterable[tuple[str, str, str]]]) -> None:
        """Fill the index, once.

        Args:
            read: yields each name with its two keys, most recently used last. Its errors propagate,
                and the next call tries again.
        """
        with self._loading:
            if self._is_loaded:
                return
            with self._lock:
                self._changes = []
            try:
                found = list(read())
            except BaseException:
                with self._lock:
                    self._changes = None
                raise
            with self._lock:
                for name, first_key, transcript_key in found:
                    self._add(name, first_key, transcript_key)
                for change in self._changes:
                    change()
                self._changes, self._is_loaded = None, True

    def add(self, name: str, first_key: str, transcript_key: str) -> None:
        """Add or update a session as the most recently used one."""
        self._change(partial(self._add, name, first_key, transcript_key))

    def remove(self, name: str) -> None:
        """Remove a session, if the index has it."""
        self._change(partial(self._remove, name))

    def candidates(
        self, first_keys: Sequence[str], transcript_keys: Sequence[str], most: int
    ) -> list[str]:
        """Sessions that messages may continue: those whose whole transcript is a prefix, longest
        first, then those with equal first messages, most recently used first.

        Args:
            first_keys, transcript_keys: keys of the prefixes of the messages, shortest first.
            most: maximum number of names.
        """
        with self._lock:
            continued = [self._by_transcript.get(key, {}) for key in reversed(transcript_keys)]
            alike = [self._by_first.get(key, {}) for key in reversed(first_keys)]
            matches = [name for names in (*continued, *alike) for name in reversed(names)]
        return list(dict.fromkeys(matches))[:most]

    def _change(self, change: Callable[[], None]) -> None:
        with self._lock:
            if self._is_loaded:
                change()
            elif self._changes is not None:  # before a load the store has the change
                self._changes.append(change)

    def _add(self, name: str, first_key: str, transcript_key: str) -> None:
        self._remove(name)
        self._keys[name] = first_key, transcript_key
        for names, key in ((self._by_first, first_key), (self._by_transcript, transcript_key)):
            names.setdefault(key, {})[name] = None

    def _remove(self, name: str) -> None:
        keys = self._keys.pop(name, None)
        if keys is None:
            return
        for names, key in zip((self._by_first, self._by_transcript), keys, strict=True):
            del names[key][name]
            if not names[key]:
                del names[key]
