"""Loading of stored sessions into memory, and locks that keep them there."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from larder.core.errors import InputError
from larder.core.session_name import root_name
from larder.models.decoder import Decoder
from larder.server.api_errors import invalid_request
from larder.server.persistence import session_file
from larder.server.persistence.base import (
    ANSWERED_LABEL,
    PAUSES_LABEL,
    SessionPersistence,
    StoredSession,
)
from larder.server.persistence.session_file import SessionFileLimit, TranscriptSnapshot
from larder.server.request import ApiError, Request, SessionUnreadableError
from larder.server.serving_policy import ServingPolicy
from larder.server.session_index import SessionIndex
from larder.server.session_state import SessionState
from larder.store.failures import ReasonCounter
from larder.store.sessions.records import PINNED_LABEL, YES

LOG = logging.getLogger(__name__)
MAX_FAMILY = 8  # sessions of a family that are loaded without comparing messages


class SessionRestorer:
    """Creates sessions in memory from their stored state. For the model's thread.

    `passed_over` counts sessions that might match a request but could not be loaded, by error code;
    `restarted` those with a damaged transcript, restarted from the text of a request.

    Args:
        persistence: has the stored sessions.
        policies: those that sessions may have; the first is the default.
        charge: charges a new session, or raises.
    """

    def __init__(
        self,
        decoder: Decoder,
        sessions: SessionIndex,
        persistence: SessionPersistence,
        policies: Sequence[ServingPolicy],
        charge: Callable[[SessionState], SessionState],
    ) -> None:
        self._decoder, self._sessions, self._persistence = decoder, sessions, persistence
        self._policies, self._charge = policies, charge
        self.passed_over, self.restarted = ReasonCounter(), ReasonCounter()

    def restore(self, tenant: str, name: str) -> None:
        """Load a session, if it is stored but not in memory."""
        if self._sessions.has(tenant, name):
            return
        stored = self._persistence.load(tenant, name)
        if stored is not None:
            self.install(tenant, name, stored, self.decode(stored.data, "session"))

    @contextmanager
    def tolerate_failures(self, name: str) -> Iterator[None]:
        """Context in which a session that no request has named may fail to load: the failure is
        counted and logged. From any thread."""
        try:
            yield
        except ApiError as error:
            self.passed_over.count(error.code)
            LOG.info("Candidate session %r cannot be loaded and is skipped: %s", name, error)

    def restart_from_request(self, error: SessionUnreadableError, request: Request) -> None:
        """Allow a session with a damaged transcript to restart from the messages of a request. From
        any thread.

        Raises:
            SessionUnreadableError: the request does not carry the whole conversation.
        """
        if request.follows is not None:
            raise error
        self.restarted.count("damaged")
        LOG.warning("Session %r restarts from the text of a request: %s", request.session, error)

    def decode(
        self,
        data: bytes,
        param: str | None = None,
        limit: SessionFileLimit = session_file.STORE_LIMIT,
    ) -> TranscriptSnapshot:
        """Decode a transcript. From any thread; takes time linear in the length of the session.

        Args:
            param: field of the request that an error names.
            limit: size limits.

        Raises:
            ApiError: 400 `invalid_request`, the data are damaged or of another model.
        """
        try:
            decoder = self._decoder
            return session_file.decode(data, decoder.spec.fingerprint, decoder.vocab_size, limit)
        except InputError as error:
            raise invalid_request(str(error), param) from error

    def create(self, tenant: str, name: str, transcript: TranscriptSnapshot) -> SessionState:
        """Create a session from a transcript.

        Raises:
            ApiError: 409 `session_exists`.
        """
        session = self._sessions.open(tenant, name, self._policies[0])
        session.transcript.opening_messages = transcript.opening_messages
        session.transcript.turns = transcript.turns
        session.transcript.epoch = len(transcript.turns)
        if transcript.turns:
            self._sessions.index_session(session)
        return session

    def install(
        self, tenant: str, name: str, stored: StoredSession, transcript: TranscriptSnapshot
    ) -> SessionState:
        """Create a session from its stored state, unless it is in memory already.

        Raises:
            ApiError: 400 `kv_budget_exceeded`, there is no room.
        """
        if self._sessions.has(tenant, name):
            return self._sessions.find(tenant, name)
        session = self.create(tenant, name, transcript)
        usage = session.usage
        session.durability.epoch, session.durability.turns = stored.epoch, len(session.turns)
        session.transcript.epoch = int(stored.labels.get("epoch", len(session.turns)))
        created = float(stored.labels.get("made", session.identity.created))
        session.identity = replace(session.identity, created=created)
        usage.answered = float(stored.labels.get(ANSWERED_LABEL, 0.0))
        usage.think_times.extend(map(float, stored.labels.get(PAUSES_LABEL, "").split()))
        usage.is_pinned = stored.labels.get(PINNED_LABEL) == YES
        for serving in self._policies:
            if stored.saved_cache is not None and str(serving.policy) == stored.policy:
                session.serving, session.residency.saved_cache = serving, stored.saved_cache
                session.residency.is_lossless = stored.saved_cache.is_lossless
                break
        return self._charge(session)


Result = TypeVar("Result")


class CandidateLoader:
    """Loads the sessions that a request may continue. As thread-safe as `call` and `recall`.

    Args:
        persistence: knows the stored sessions.
        residency_locks: keep sessions in memory.
        call: runs a function on the thread that owns the sessions.
        recall: loads a tenant's session into memory, if it is stored.
        restorer: handles sessions that cannot be loaded.
    """

    def __init__(
        self,
        sessions: SessionIndex,
        persistence: SessionPersistence,
        residency_locks: ResidencyLocks,
        call: Callable[[Callable[[], Any]], Any],
        recall: Callable[[str, str], object],
        restorer: SessionRestorer,
    ) -> None:
        self._sessions = sessions
        self._persistence = persistence
        self._residency_locks = residency_locks
        self._call, self._recall, self._restorer = call, recall, restorer

    @contextmanager
    def resident(self, tenant: str, *names: str | None) -> Iterator[None]:
        """Context in which sessions are in memory, if they exist, and stay there.

        Raises:
            ApiError: a stored session cannot be loaded.
        """
        with self._residency_locks.hold(tenant, *names):
            for name in self._missing(tenant, names):
                self._recall(tenant, name)
            yield

    def resolve_resident(
        self, request: Request, serving: ServingPolicy, take: Callable[[], Result]
    ) -> Result:
        """Load all sessions that a request may continue, then return the result of `take`.

        If the request creates a branch, its name is unused both in memory and in the store.

        Args:
            take: resolves the request on the thread that owns the sessions.

        Raises:
            ApiError: a stored session that the request names cannot be loaded.
        """
        tenant, sessions = request.tenant, self._sessions
        named = [name for name in (request.session, request.follows) if name is not None]
        with self._residency_locks.hold(tenant, *named):
            results = list[Result]()  # one call of the model's thread suffices if all are in memory
            missing = self._call(
                lambda: self._resolve_if_resident(request, serving, named, take, results)
            )
            failed = [name for name in missing if not self._load_named(request, name)]
            if results:
                return results[0]
            names = [name for name in self._names(request) if name not in failed]
            with self._residency_locks.hold(tenant, *names):
                self.restore_candidates(tenant, names)
                root = self._call(lambda: self._branch_root(request, serving, take, results))
                if root is None:
                    return results[0]
                with self._residency_locks.hold(tenant, root):
                    family = self.family(tenant, root)

                    def branched() -> Result:
                        sessions.reserve_names(tenant, root, family)
                        return take()

                    return self._call(branched)

    def _load_named(self, request: Request, name: str) -> bool:
        """Load a session that a request names; False if it restarts from the request.

        Raises:
            ApiError: the stored session cannot be loaded.
        """
        try:
            self._recall(request.tenant, name)
        except SessionUnreadableError as error:
            self._restorer.restart_from_request(error, request)
            return False
        return True

    def restore_candidates(self, tenant: str, names: Iterable[str]) -> list[str]:
        """Load sessions that the request did not name; the names of those that failed."""
        failed = self._missing(tenant, names)
        for name in tuple(failed):
            with self._restorer.tolerate_failures(name):
                self._recall(tenant, name)
                failed.remove(name)
        return failed

    def family(self, tenant: str, name: str) -> Sequence[str]:
        """The root of a session, and all stored branches of it, as far as the
        store can list them."""
        root = root_name(name)
        stored = [root]
        with self._restorer.tolerate_failures(root):
            stored += self._persistence.branches(tenant, root)
        return stored

    def _missing(self, tenant: str, names: Iterable[str | None]) -> list[str]:
        """Names of sessions that are not in memory."""
        unique = [name for name in dict.fromkeys(names) if name is not None]
        has = self._sessions.has
        return self._call(lambda: [e for e in unique if not has(tenant, e)]) if unique else []

    def _resolve_if_resident(
        self,
        request: Request,
        serving: ServingPolicy,
        named: Sequence[str],
        take: Callable[[], Any],
        results: list[Any],
    ) -> list[str]:
        """Resolve a request whose session is in memory or new; else return the named sessions that
        are missing. On the thread that owns the sessions."""
        sessions = self._sessions
        missing = [name for name in named if not sessions.has(request.tenant, name)]
        is_looked_for = request.is_nameless or request.session is not None
        if missing or (is_looked_for and not sessions.has_exact_match(request)):
            return missing
        self._branch_root(request, serving, take, results)
        return []

    def _branch_root(
        self, request: Request, serving: ServingPolicy, take: Callable[[], Any], results: list[Any]
    ) -> str | None:
        """The root of the session that a request branches from; without a branch the request is
        resolved. On the thread that owns the sessions."""
        root = self._sessions.branch_root(request, serving)
        if root is None:
            results.append(take())
        return root

    def _names(self, request: Request) -> Sequence[str]:
        """Names of sessions that a request may continue."""
        if request.is_nameless:
            return self._persistence.candidates(request.tenant, request.turns)
        if request.session is None:
            return ()
        family = self.family(request.tenant, request.session)
        if len(family) <= MAX_FAMILY:
            return family
        return (family[0], *self._persistence.candidates(request.tenant, request.turns))


class ResidencyLocks:
    """Counted locks that keep families of sessions in memory. Thread-safe."""

    def __init__(self) -> None:
        self._families: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, tenant: str, *names: str | None) -> Iterator[None]:
        """Context in which a tenant's sessions, and all branches of the same
        roots, stay in memory."""
        families = [(tenant, root_name(name)) for name in names if name is not None]
        with self._lock:
            self._families.update(families)
        try:
            yield
        finally:
            with self._lock:
                self._families.subtract(families)
                self._families = +self._families

    def is_held(self, session: SessionState) -> bool:
        """True if a session's family is locked."""
        with self._lock:
            return self._families[session.tenant, session.root] > 0
