"""Turns that outlive the process: each is written before the end of its answer is told.

What is written is what was said, token for token, by a thread of its own: answers of others go on
meanwhile. Where the store does not take a turn, whoever waits for it is told why.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

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
from larder.server.engine_client import SessionInfo
from larder.server.persistence import session_file
from larder.server.persistence.base import (
    ANSWERED_LABEL,
    PAUSES_LABEL,
    SessionPersistence,
    StoredSession,
)
from larder.server.persistence.fencing import EpochFence
from larder.server.request import ApiError, ChatMessage, SessionUnreadableError
from larder.server.session_info import stored_session_info
from larder.server.session_state import ASSISTANT, CompletedTurn, SavedCache, SessionState
from larder.store.digests import mac_of
from larder.store.sessions.records import NO, PINNED_LABEL, ROOT_LABEL, YES, Record
from larder.store.sessions.turn_store import SessionTurn as Written
from larder.store.sessions.turn_store import StagedCache
from larder.store.store import Store

FIRST_MESSAGES_LABEL = "first"  # the label of what a session began with
KEY_DIGITS = 16
ALL_MESSAGES_LABEL = "said"  # the label of all that was said in it
MODEL_LABEL = "model"  # the label of the model's fingerprint
MAX_CANDIDATES = 8  # sessions that are looked at for one request


class StoreSessionPersistence(SessionPersistence):
    """Writes sessions to a store. `commit`, `remove` and `merge` are for the model's thread.

    `failed` counts turns that could not be written, by kind of error.
    """

    def __init__(self, store: Store, spec: ModelSpec) -> None:
        self._store, self._fingerprint = store, spec.fingerprint
        self._fencing = EpochFence(store)
        self._pool = ThreadPoolExecutor(1, "larder writing")  # so turns follow each other
        self._names: dict[str, SessionNameIndex] = defaultdict(
            SessionNameIndex
        )  # by tenant, once it was asked for
        self._naming = threading.Lock()
        self._damaged: set[tuple[str, str]] = set()  # sessions that may have to be begun again
        self.failed: Counter[str] = Counter()

    def commit(
        self, sitting: SessionState, said: CompletedTurn
    ) -> Future[LarderError | None] | None:
        told = session_file.take_snapshot(sitting)
        noted = {"epoch": str(sitting.epoch), PAUSES_LABEL: " ".join(map(str, sitting.pauses))}
        return self._pool.submit(self._write, sitting, told, sitting.ids, noted)

    def attach(
        self, sitting: SessionState, prepared: StagedCache, labels: Mapping[str, str]
    ) -> Future[Record]:
        """Have a cache stand with its session. From any thread."""

        own = sitting.tenant, sitting.name

        def attached(epoch: int, mark: Mapping[str, str]) -> Record:
            return self._store.turns.attach(*own, prepared, epoch, {**labels, **mark})

        return self._pool.submit(self._fencing.write, sitting, attached)

    def recall(self, tenant: str, name: str) -> StoredSession | None:
        """A session as it was written last; None where there is none.

        Raises:
            Unreadable: what is written of it is damaged. If it is begun again under its name, that
                takes the place of what is damaged.
            Refusal: it cannot be had now, for what else would be served might be another one.
        """
        try:
            found = self._store.turns.newest(tenant, name)
            if found is None:  # it was removed, perhaps by others, or has left a full store
                self._lose(tenant, name)
                return None
            record, data = found
            kept = saved_cache(record) if self._store.turns.has_cache(record) else None
        except Damaged as error:
            self.failed[type(error).__name__] += 1
            self._damaged.add((tenant, name))
            raise SessionUnreadableError(name) from error
        except (Refused, StoreError) as error:
            self.failed[type(error).__name__] += 1
            raise ApiError(
                f"Session {name!r} cannot be read back now: the server's log says why.",
                503,
                "session_unreadable",
            ) from error
        return StoredSession(data, record.epoch, kept, record.policy, record.labels)

    def names(self, tenant: str, turns: Sequence[ChatMessage]) -> Sequence[str]:
        told = list(self._rolling(turns)), list(self._rolling(map(_stripped, turns)))
        with self._naming:
            known = self._names[tenant]
        try:
            known.load(lambda: self._keys_of(tenant))
        except LarderError as error:
            self.failed[type(error).__name__] += 1
            return ()
        return known.found(*told, MAX_CANDIDATES)

    def branches(self, tenant: str, root: str) -> Sequence[str]:
        try:
            return self._store.turns.branches(tenant, root)
        except StoreError as error:
            self._note(error)
            raise ApiError(
                f"Which branches session {root!r} has cannot be told now: try again; the server's "
                "log says why.",
                503,
                "session_unreadable",
            ) from error

    def list_sessions(self, tenant: str) -> Sequence[SessionInfo]:
        turns = self._store.turns
        return [stored_session_info(each, turns.has_cache(each)) for each in turns.of(tenant)]

    def merge(self, tenant: str, name: str) -> None:
        self._store.turns.merge(tenant, name)

    def pin(self, sitting: SessionState) -> Future[None] | None:
        return self._pool.submit(self._pin, sitting)

    def remove(self, sitting: SessionState) -> Future[None] | None:
        """Have the store forget a session."""
        return self._pool.submit(self._remove, sitting)

    def discard(self, tenant: str, name: str) -> Future[None] | None:
        return self._pool.submit(self._discard, tenant, name)

    def close(self) -> None:
        self._pool.shutdown()

    def _write(
        self,
        sitting: SessionState,
        told: session_file.TranscriptSnapshot,
        ids: Sequence[int],
        noted: Mapping[str, str],
    ) -> LarderError | None:
        """Write a session; why that cannot be done.

        Raises:
            Refusal: somebody else has gone on with it meanwhile.
        """
        own = sitting.tenant, sitting.name
        *_, first = self._rolling(told.said[0].turns)
        *_, whole = self._rolling(map(_stripped, _messages(told.said)))
        labels = {
            FIRST_MESSAGES_LABEL: first,
            ALL_MESSAGES_LABEL: whole,
            MODEL_LABEL: self._fingerprint,
            ROOT_LABEL: told.root,
            "turns": str(sum(len(each.turns) + 1 for each in told.said)),
            "made": str(sitting.made),
            ANSWERED_LABEL: str(self._store.parts.clock()),
            **noted,
            PINNED_LABEL: YES if sitting.is_pinned else NO,
        }
        transcript = session_file.encode(told, self._fingerprint)

        def appended(epoch: int, mark: Mapping[str, str]) -> Record:
            turn = Written(ids, transcript, {**labels, **mark})
            return self._store.turns.append(*own, turn, epoch)

        try:
            if not sitting.written and own in self._damaged:
                sitting.written = self._store.turns.restart_epoch(*own)
            self._fencing.write(sitting, appended)
            self._damaged.discard(own)
        except Superseded as error:
            sitting.is_superseded = True
            raise session_superseded(sitting.name) from error
        except (BudgetError, StoreError) as error:
            self._note(error)
            return error
        sitting.durable_turns = len(told.said)
        with self._naming:
            known = self._names.get(sitting.tenant)
        if known is not None:  # else nothing was looked up, and need not be
            known.add(sitting.name, first, whole)
        return None

    def _rolling(self, turns: Iterable[ChatMessage]) -> Iterator[str]:
        """A number for each beginning of some messages, by which nobody else can tell them; equal
        ones are compared before they count."""
        key = FIRST_MESSAGES_LABEL
        for turn in turns:
            key = mac_of(self._store.parts.secret, key, turn.role, turn.text)[:KEY_DIGITS]
            yield key

    def _pin(self, sitting: SessionState) -> None:
        """Raises: Refusal: somebody else has gone on with it meanwhile, or it cannot be written."""
        own, said = (sitting.tenant, sitting.name), YES if sitting.is_pinned else NO

        def labeled(epoch: int, mark: Mapping[str, str]) -> Record:
            return self._store.turns.label(*own, {PINNED_LABEL: said, **mark}, epoch)

        try:
            if sitting.written or self._fencing.catches_up(sitting):  # else the first turn says so
                self._fencing.write(sitting, labeled)
        except Superseded as error:
            raise session_superseded(sitting.name) from error
        except (BudgetError, StoreError) as error:
            self._note(error)
            raise ApiError(
                f"Whether session {sitting.name!r} is pinned cannot be written now: try again; the "
                "server's log says why.",
                503,
                "session_unwritten",
            ) from error

    def _remove(self, sitting: SessionState) -> None:
        """Raises: BudgetError, StoreError: the store has it, or may have it."""
        try:
            self._fencing.remove(sitting)
        except (BudgetError, StoreError) as error:
            if sitting.written or sitting.write_mark:
                raise
            self._note(error)
        self._lose(sitting.tenant, sitting.name)

    def _discard(self, tenant: str, name: str) -> None:
        with suppress(InputError):  # there is none any more
            self._store.sessions.remove(tenant, name)
        self._lose(tenant, name)

    def _note(self, error: LarderError) -> None:
        self.failed[type(error).__name__] += 1
        self._store.parts.unwritten.note_error(error)

    def _lose(self, tenant: str, name: str) -> None:
        with self._naming:
            known = self._names.get(tenant)
        if known is not None:
            known.remove(name)

    def _keys_of(self, tenant: str) -> Iterator[tuple[str, str, str]]:
        """Sessions that the index knows, the one that was used last last."""
        for each in reversed(self._store.turns.of(tenant)):
            if (
                each.labels.get(MODEL_LABEL, self._fingerprint) == self._fingerprint
            ):  # else not for here
                yield (
                    each.name,
                    each.labels.get(FIRST_MESSAGES_LABEL, ""),
                    each.labels.get(ALL_MESSAGES_LABEL, ""),
                )


def _messages(said: Sequence[CompletedTurn]) -> Iterator[ChatMessage]:
    for each in said:
        yield from each.turns
        yield ChatMessage(ASSISTANT, each.text)


def _stripped(turn: ChatMessage) -> ChatMessage:
    """White space around an answer does not count."""
    return replace(turn, text=turn.text.strip()) if turn.role == ASSISTANT else turn


def saved_cache(record: Record) -> SavedCache | None:
    """What a record tells of a cache."""
    if not record.spans:
        return None
    labels, tokens = record.labels, record.num_cached_tokens
    return SavedCache(
        tokens=tokens,
        settled_tokens=int(labels.get("settled", tokens)),
        entries=int(labels.get("entries", 0)),
        nbytes=sum(ref.bytes for ref in record.cache_refs),
        cache_bytes=record.cache_bytes,
        is_coded=labels.get("coded") == "yes",
        is_lossless=labels.get("whole") == "yes",
        caches=1 + len(record.others),
    )


class SessionNameIndex:
    """Names by two keys: of what a session began with, and of all that was said in it.

    Safe from threads. It knows nothing before `load`, which takes as long as there are sessions:
    what changes meanwhile waits for it, and whoever changes it does not.
    """

    def __init__(self) -> None:
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._is_loaded = False
        self._late: list[Callable[[], None]] | None = None  # changes while it is being loaded
        self._keys: dict[str, tuple[str, str]] = {}
        self._firsts: dict[str, dict[str, None]] = {}
        self._wholes: dict[str, dict[str, None]] = {}

    def load(self, read: Callable[[], Iterable[tuple[str, str, str]]]) -> None:
        """Have it know the sessions that there are, once.

        Args:
            read: finds their names, each with its two keys, the one that was used last last. What
                it fails with is passed on; then it is asked again the next time.
        """
        with self._loading:
            if self._is_loaded:
                return
            with self._lock:
                self._late = []
            try:
                found = list(read())
            except BaseException:
                with self._lock:
                    self._late = None
                raise
            with self._lock:
                for told in found:
                    self._add(*told)
                for change in self._late:
                    change()
                self._late, self._is_loaded = None, True

    def add(self, name: str, first: str, whole: str) -> None:
        """A session has come to this; it is the one that was used last."""
        self._change(partial(self._add, name, first, whole))

    def remove(self, name: str) -> None:
        """It is not kept any more; nothing happens where it is unknown."""
        self._change(partial(self._remove, name))

    def found(self, firsts: Sequence[str], wholes: Sequence[str], most: int) -> list[str]:
        """Who may be meant by messages: those that they go on with, the longest first, then those
        that began alike, the one that was used last first.

        Args:
            firsts, wholes: the keys of their beginnings, from the shortest to the longest.
        """
        with self._lock:
            going_on = [self._wholes.get(key, {}) for key in reversed(wholes)]
            alike = [self._firsts.get(key, {}) for key in reversed(firsts)]
            told = [name for names in (*going_on, *alike) for name in reversed(names)]
        return list(dict.fromkeys(told))[:most]

    def _change(self, change: Callable[[], None]) -> None:
        with self._lock:
            if self._is_loaded:
                change()
            elif self._late is not None:  # else whoever loads it finds it changed
                self._late.append(change)

    def _add(self, name: str, first: str, whole: str) -> None:
        self._remove(name)
        self._keys[name] = first, whole
        for names, key in ((self._firsts, first), (self._wholes, whole)):
            names.setdefault(key, {})[name] = None

    def _remove(self, name: str) -> None:
        keys = self._keys.pop(name, None)
        if keys is None:
            return
        for names, key in zip((self._firsts, self._wholes), keys, strict=True):
            del names[key][name]
            if not names[key]:
                del names[key]
