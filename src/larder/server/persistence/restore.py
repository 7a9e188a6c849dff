"""Sessions that are not in memory, brought there from where they are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from larder.core.errors import InputError
from larder.models.decoder import Decoder
from larder.server.api_errors import invalid_request
from larder.server.persistence import session_file
from larder.server.persistence.base import ANSWERED_LABEL, PAUSES_LABEL, StoredSession
from larder.server.persistence.session_file import SessionFileLimit, TranscriptSnapshot
from larder.server.reason_counter import ReasonCounter
from larder.server.request import ApiError, Request, SessionUnreadableError
from larder.server.serving_policy import ServingPolicy
from larder.server.session_index import SessionIndex
from larder.server.session_state import SessionState
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
    def guessing(self, name: str) -> Iterator[None]:
        """While a session is had that nobody has named: one that cannot be had is passed over.

        From any thread.
        """
        try:
            yield
        except ApiError as error:
            self.passed_over.note(error.code)
            LOG.info("Session %r may be meant, and is passed over: %s", name, error)

    def begin_again(self, error: SessionUnreadableError, request: Request) -> None:
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
            return session_file.decode(data, decoder.spec.fingerprint, decoder.vocabulary, limit)
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
        sitting.written, sitting.logged = found.epoch, len(sitting.said)
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
