"""Sessions that are not in memory, brought there from where they are kept."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from larder.server.stats import ReasonCounter
from larder.store.sessions.records import PINNED_LABEL, YES

LOG = logging.getLogger(__name__)
Lookup = Callable[[str, str], StoredSession | None]


class SessionRestorer:
    """For the model's thread.

    `passed_over` counts sessions that may have been meant and could not be had, by the code of why;
    `begun_again` those whose saved text is damaged, and that go on from the text of a request.

    Args:
        lookup: finds what is kept of a tenant's session.
        rules: that sessions may be held under; the first is the usual one.
        weigh: takes a session in, or refuses it.
    """

    def __init__(
        self,
        decoder: Decoder,
        sessions: SessionIndex,
        lookup: Lookup,
        rules: Sequence[ServingPolicy],
        weigh: Callable[[SessionState], SessionState],
    ) -> None:
        self._decoder, self._sessions, self._lookup = decoder, sessions, lookup
        self._rules, self._weigh = rules, weigh
        self.passed_over, self.begun_again = ReasonCounter(), ReasonCounter()

    def recall(self, tenant: str, *names: str | None) -> None:
        """Have sessions be in memory that are kept elsewhere."""
        for name in names:
            if name is None or self._sessions.has(tenant, name):
                continue
            found = self._lookup(tenant, name)
            if found is not None:
                self.take(tenant, name, found, self.read(found.data, "session"))

    @contextmanager
    def tolerate_failures(self, name: str) -> Iterator[None]:
        """While a session is had that nobody has named: one that cannot be had is passed over.

        From any thread.
        """
        try:
            yield
        except ApiError as error:
            self.passed_over.note(error.code)
            LOG.info("Session %r may be meant, and is passed over: %s", name, error)

    def restart_from_request(self, error: SessionUnreadableError, request: Request) -> None:
        """Have a session whose saved text is damaged go on from what a request says. From any
        thread.

        Raises:
            Unreadable: that is not all of it.
        """
        if request.follows is not None:
            raise error
        self.begun_again.note("damaged")
        LOG.warning("Session %r goes on from the text of a request: %s", request.session, error)

    def read(
        self,
        data: bytes,
        param: str | None = None,
        limit: SessionFileLimit = session_file.STORE_LIMIT,
    ) -> TranscriptSnapshot:
        """What `archive.told` has told. From any thread: it takes as long as the session is.

        Args:
            param: the field of the request that is to blame.
            limit: of what it holds.

        Raises:
            Refusal: it is damaged, or another model's.
        """
        try:
            decoder = self._decoder
            return session_file.decode(data, decoder.spec.fingerprint, decoder.vocab_size, limit)
        except InputError as error:
            raise invalid_request(str(error), param) from error

    def imported(self, tenant: str, name: str, told: TranscriptSnapshot) -> SessionState:
        """A session that was read.

        Raises:
            Refusal: there is one of that name.
        """
        sitting = self._sessions.open(tenant, name, self._rules[0])
        sitting.opening, sitting.said, sitting.epoch = told.opening, told.said, len(told.said)
        if told.said:
            self._sessions.remember(sitting)
        return sitting

    def take(
        self, tenant: str, name: str, found: StoredSession, told: TranscriptSnapshot
    ) -> SessionState:
        """A session that was found and read, in memory from now on.

        Raises:
            Refusal: there is no room.
        """
        if self._sessions.has(tenant, name):
            return self._sessions.find(tenant, name)
        sitting = self.imported(tenant, name, told)
        sitting.written, sitting.durable_turns = found.epoch, len(sitting.said)
        sitting.epoch = int(found.labels.get("epoch", len(sitting.said)))
        sitting.made = float(found.labels.get("made", sitting.made))
        sitting.answered = float(found.labels.get(ANSWERED_LABEL, 0.0))
        sitting.pauses.extend(map(float, found.labels.get(PAUSES_LABEL, "").split()))
        sitting.is_pinned = found.labels.get(PINNED_LABEL) == YES
        for rule in self._rules:
            if found.kept is not None and str(rule.policy) == found.policy:
                sitting.rule, sitting.kept = rule, found.kept
                sitting.is_lossless = found.kept.is_lossless
                break
        return self._weigh(sitting)


Result = TypeVar("Result")
MAX_FAMILY = 8  # of a family, that are brought to memory whatever was said in them


class CandidateLoader:
    """Safe from the threads that `call` and `recall` are safe from.

    Args:
        keeper: knows which sessions are kept.
        awaited: what is to stay in memory.
        call: has a function be called where sessions are at home.
        recall: has a tenant's session be in memory, if it is kept.
        recalling: says what becomes of sessions that cannot be had.
    """

    def __init__(
        self,
        sessions: SessionIndex,
        keeper: SessionPersistence,
        awaited: ResidencyLocks,
        call: Callable[[Callable[[], Any]], Any],
        recall: Callable[[str, str], object],
        recalling: SessionRestorer,
    ) -> None:
        self._sessions, self._keeper, self._awaited = sessions, keeper, awaited
        self._call, self._recall, self._recalling = call, recall, recalling

    @contextmanager
    def these(self, tenant: str, *names: str | None) -> Iterator[None]:
        """While sessions are in memory, where they are kept at all, and do not leave it.

        Raises:
            Refusal: one is kept, and cannot be had.
        """
        with self._awaited.these(tenant, *names):
            for name in self._lacking(tenant, names):
                self._recall(tenant, name)
            yield

    def resolve_resident(
        self, request: Request, rule: ServingPolicy, take: Callable[[], Result]
    ) -> Result:
        """What `take` returns, which is called once all sessions are there that a request may mean.

        Where the request makes a branch it gets a name that none has, be it in memory or not.

        Args:
            take: takes the request where sessions are at home.

        Raises:
            Refusal: a session that the request names is kept, and cannot be had.
        """
        tenant, sessions = request.tenant, self._sessions
        named = [name for name in (request.session, request.follows) if name is not None]
        with self._awaited.these(tenant, *named):
            made = list[Result]()  # nobody waits for the model's thread twice where all is there
            lacking = self._call(lambda: self._begun(request, rule, named, take, made))
            lost = [name for name in lacking if not self._is_had(request, name)]
            if made:
                return made[0]
            names = [name for name in self._names(request) if name not in lost]
            with self._awaited.these(tenant, *names):
                self.guess(tenant, names)
                root = self._call(lambda: self._root_or(request, rule, take, made))
                if root is None:
                    return made[0]
                with self._awaited.these(tenant, root):
                    family = self.family(tenant, root)

                    def branched() -> Result:
                        sessions.avoid(tenant, root, family)
                        return take()

                    return self._call(branched)

    def _is_had(self, request: Request, name: str) -> bool:
        """Have a session be in memory that a request names; False where it is to be begun again.

        Raises:
            Refusal: it is kept, and cannot be had.
        """
        try:
            self._recall(request.tenant, name)
        except SessionUnreadableError as error:
            self._recalling.restart_from_request(error, request)
            return False
        return True

    def guess(self, tenant: str, names: Iterable[str]) -> list[str]:
        """Have sessions be in memory that nobody has named; those that cannot be had."""
        lost = self._lacking(tenant, names)
        for name in tuple(lost):
            with self._recalling.tolerate_failures(name):
                self._recall(tenant, name)
                lost.remove(name)
        return lost

    def family(self, tenant: str, name: str) -> Sequence[str]:
        """What a session began as, and all that are kept and began as that, if it can be told."""
        root = root_name(name)
        found = [root]
        with self._recalling.tolerate_failures(root):
            found += self._keeper.branches(tenant, root)
        return found

    def _lacking(self, tenant: str, names: Iterable[str | None]) -> list[str]:
        """Those that are not in memory."""
        told, has = [each for each in dict.fromkeys(names) if each is not None], self._sessions.has
        return self._call(lambda: [e for e in told if not has(tenant, e)]) if told else []

    def _begun(
        self,
        request: Request,
        rule: ServingPolicy,
        named: Sequence[str],
        take: Callable[[], Any],
        made: list[Any],
    ) -> list[str]:
        """Take a request that goes on with a session that is there, or begins one; else those that
        it names and that are not there. Where sessions are at home."""
        sessions = self._sessions
        lacking = [name for name in named if not sessions.has(request.tenant, name)]
        is_looked_for = request.is_nameless or request.session is not None
        if lacking or (is_looked_for and not sessions.settles(request)):
            return lacking
        self._root_or(request, rule, take, made)
        return []

    def _root_or(
        self, request: Request, rule: ServingPolicy, take: Callable[[], Any], made: list[Any]
    ) -> str | None:
        """The root of what a request makes a branch of; else it is taken. Where sessions are at
        home."""
        root = self._sessions.branching(request, rule)
        if root is None:
            made.append(take())
        return root

    def _names(self, request: Request) -> Sequence[str]:
        """Sessions that a request may mean."""
        if request.is_nameless:
            return self._keeper.names(request.tenant, request.turns)
        if request.session is None:
            return ()
        family = self.family(request.tenant, request.session)
        if len(family) <= MAX_FAMILY:
            return family
        return (family[0], *self._keeper.names(request.tenant, request.turns))


class ResidencyLocks:
    """Safe from threads."""

    def __init__(self) -> None:
        self._families: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def these(self, tenant: str, *names: str | None) -> Iterator[None]:
        """While a tenant's sessions are awaited, with all that began as they did."""
        families = [(tenant, root_name(name)) for name in names if name is not None]
        with self._lock:
            self._families.update(families)
        try:
            yield
        finally:
            with self._lock:
                self._families.subtract(families)
                self._families = +self._families

    def has(self, sitting: SessionState) -> bool:
        """Whether somebody is about to use a session, or one of its family."""
        with self._lock:
            return self._families[sitting.tenant, sitting.root] > 0
