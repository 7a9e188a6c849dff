"""Session leases: sessions in a store that several servers share.

Epochs prevent two servers from both writing a session. Leases prevent both from working on it, and
a server that was declared dead from writing when it wakes up.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from larder.core.errors import LarderError, StoreError
from larder.server.api_errors import session_held, session_superseded
from larder.server.engine_client import SessionInfo
from larder.server.persistence.base import SessionPersistence, StoredSession
from larder.server.persistence.fencing import EpochFence
from larder.server.request import ChatMessage
from larder.server.session_state import CompletedTurn, SessionState
from larder.store.leases import HEARTBEAT_SECONDS, LeaseConflict, SessionLease, SessionLeases
from larder.store.store import Store

LOG = logging.getLogger(__name__)


class LeasedSessionPersistence(SessionPersistence):
    """Persistence that leases a session while it answers, around another one. For the model's
    thread.

    If the store fails, answers continue, and epochs alone decide which server's write counts.

    Args:
        persistence: writes and reads the sessions.
        leases: those of this server.

    `failed` counts failed store operations by type of error.
    """

    def __init__(
        self, persistence: SessionPersistence, store: Store, leases: SessionLeases
    ) -> None:
        self._persistence, self._leases, self._fence = persistence, leases, EpochFence(store)
        self._active: dict[int, SessionLease] = {}
        self.failed: Counter[str] = Counter()

    def commit(
        self, session: SessionState, turn: CompletedTurn
    ) -> Future[LarderError | None] | None:
        """Write the session, as `SessionPersistence.commit`.

        Raises:
            ApiError: 409 `session_superseded`, the lease is lost.
        """
        lease = self._active.get(session.key)
        try:
            if lease is not None and not self._leases.holds(lease):
                session.is_superseded = True
                raise session_superseded(session.name)
        except StoreError as error:
            self._note(error)
        return self._persistence.commit(session, turn)

    def discard_new(self, session: SessionState) -> None:
        self._persistence.discard_new(session)

    def load(self, tenant: str, name: str) -> StoredSession | None:
        return self._persistence.load(tenant, name)

    def candidates(self, tenant: str, turns: Sequence[ChatMessage]) -> Sequence[str]:
        return self._persistence.candidates(tenant, turns)

    def branches(self, tenant: str, root: str) -> Sequence[str]:
        return self._persistence.branches(tenant, root)

    def list_sessions(self, tenant: str) -> Sequence[SessionInfo]:
        return self._persistence.list_sessions(tenant)

    def compact_history(self, tenant: str, name: str) -> None:
        self._persistence.compact_history(tenant, name)

    def close(self) -> None:
        self._persistence.close()

    def pin(self, session: SessionState) -> Future[None] | None:
        return self._persistence.pin(session)

    def remove(self, session: SessionState) -> Future[None] | None:
        return self._persistence.remove(session)

    def discard(self, tenant: str, name: str) -> Future[None] | None:
        return self._persistence.discard(tenant, name)

    def is_outdated(self, session: SessionState) -> bool:
        if session.pending_writes:  # the newest state is this server's own, being written
            return False
        try:
            return self._fence.is_outdated(session)
        except StoreError as error:
            self._note(error)
            return False

    def acquire(self, session: SessionState) -> None:
        try:
            self._active[session.key] = self._leases.take(session.tenant, session.name)
        except LeaseConflict as error:
            raise session_held(session.name, error.seconds) from error
        except StoreError as error:
            self._note(error)

    def release(self, session: SessionState) -> None:
        lease = self._active.pop(session.key, None)
        try:
            if lease is not None:
                self._leases.release(lease)
        except StoreError as error:
            self._note(error)
        self._persistence.release(session)

    def _note(self, error: StoreError) -> None:
        self.failed[type(error).__name__] += 1
        LOG.warning("Shared session store: %s", error)


class LeaseHeartbeat:
    """Thread that renews a server's leases until it is closed."""

    def __init__(self, leases: SessionLeases, seconds: float = HEARTBEAT_SECONDS) -> None:
        self._leases, self._seconds = leases, seconds
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="larder alive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeat and release all leases at once."""
        self._is_closing.set()
        self._thread.join()
        self._try(self._leases.close)

    def _run(self) -> None:
        self._try(self._leases.sweep)
        while not self._is_closing.wait(self._seconds):
            self._try(self._leases.heartbeat)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except StoreError as error:
            LOG.warning("Shared session store: %s", error)
