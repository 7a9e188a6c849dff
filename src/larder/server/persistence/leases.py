"""Sessions in a store that several servers share: who answers has a claim, and looks first.

That two servers never both write a session is seen to by its epochs. Claims see to it that they do
not both work on it, and that one which was given up for dead writes nothing when it wakes up.
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
    """Keeps sessions as another keeper does, whose store others write too. For the model's thread.

    A store that fails does not stop answers: then epochs alone decide who has written.

    Args:
        keeper: writes and reads them.
        claims: of this server.

    `failed` counts what could not be asked of the store, by kind of error.
    """

    def __init__(self, keeper: SessionPersistence, store: Store, claims: SessionLeases) -> None:
        self._keeper, self._claims, self._fencing = keeper, claims, EpochFence(store)
        self._held: dict[int, SessionLease] = {}
        self.failed: Counter[str] = Counter()

    def commit(
        self, sitting: SessionState, said: CompletedTurn
    ) -> Future[LarderError | None] | None:
        """Write the session.

        Raises:
            Refusal: somebody else goes on with it, or has gone on with it.
        """
        claim = self._held.get(sitting.key)
        try:
            if claim is not None and not self._claims.holds(claim):
                sitting.is_superseded = True
                raise session_superseded(sitting.name)
        except StoreError as error:
            self._note(error)
        return self._keeper.commit(sitting, said)

    def discard_new(self, sitting: SessionState) -> None:
        self._keeper.discard_new(sitting)

    def recall(self, tenant: str, name: str) -> StoredSession | None:
        return self._keeper.recall(tenant, name)

    def names(self, tenant: str, turns: Sequence[ChatMessage]) -> Sequence[str]:
        return self._keeper.names(tenant, turns)

    def branches(self, tenant: str, root: str) -> Sequence[str]:
        return self._keeper.branches(tenant, root)

    def list_sessions(self, tenant: str) -> Sequence[SessionInfo]:
        return self._keeper.list_sessions(tenant)

    def merge(self, tenant: str, name: str) -> None:
        self._keeper.merge(tenant, name)

    def close(self) -> None:
        self._keeper.close()

    def pin(self, sitting: SessionState) -> Future[None] | None:
        return self._keeper.pin(sitting)

    def remove(self, sitting: SessionState) -> Future[None] | None:
        return self._keeper.remove(sitting)

    def discard(self, tenant: str, name: str) -> Future[None] | None:
        return self._keeper.discard(tenant, name)

    def is_behind(self, sitting: SessionState) -> bool:
        if sitting.pending_writes:  # what is on its way is this server's
            return False
        try:
            return self._fencing.is_behind(sitting)
        except StoreError as error:
            self._note(error)
            return False

    def claim(self, sitting: SessionState) -> None:
        try:
            self._held[sitting.key] = self._claims.take(sitting.tenant, sitting.name)
        except LeaseConflict as error:
            raise session_held(sitting.name, error.seconds) from error
        except StoreError as error:
            self._note(error)

    def rest(self, sitting: SessionState) -> None:
        claim = self._held.pop(sitting.key, None)
        try:
            if claim is not None:
                self._claims.release(claim)
        except StoreError as error:
            self._note(error)
        self._keeper.rest(sitting)

    def _note(self, error: StoreError) -> None:
        self.failed[type(error).__name__] += 1
        LOG.warning("The store that servers share: %s", error)


class LeaseHeartbeat:
    """Says every other second that a server is alive, until it is closed."""

    def __init__(self, claims: SessionLeases, seconds: float = HEARTBEAT_SECONDS) -> None:
        self._claims, self._seconds = claims, seconds
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="larder alive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say that it has ended; what it held is free at once."""
        self._is_closing.set()
        self._thread.join()
        self._try(self._claims.close)

    def _run(self) -> None:
        self._try(self._claims.sweep)
        while not self._is_closing.wait(self._seconds):
            self._try(self._claims.heartbeat)

    def _try(self, say: Callable[[], object]) -> None:
        try:
            say()
        except StoreError as error:
            LOG.warning("The store that servers share: %s", error)
