"""What becomes of turns, in memory and where sessions are kept for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from larder.core.errors import LarderError
from larder.server.persistence.base import SessionPersistence, StoredSession
from larder.server.request import ChatMessage
from larder.server.session_index import SessionIndex
from larder.server.session_state import CompletedTurn, SessionState


class IndexedSessionPersistence(SessionPersistence):
    """Keeps the index of sessions, and hands turns on to whoever keeps them for good."""

    def __init__(
        self,
        sessions: SessionIndex,
        forget: Callable[[SessionState], None],
        keeper: SessionPersistence,
    ) -> None:
        self._sessions, self._forget, self._keeper = sessions, forget, keeper

    def commit(
        self, sitting: SessionState, said: CompletedTurn
    ) -> Future[LarderError | None] | None:
        if len(sitting.said) == 1 or sitting.epoch == 1:
            self._sessions.remember(sitting)
        return self._keeper.commit(sitting, said)

    def abandon(self, sitting: SessionState) -> None:
        self._forget(sitting)
        self._keeper.abandon(sitting)

    def recall(self, tenant: str, name: str) -> StoredSession | None:
        return self._keeper.recall(tenant, name)

    def remove(self, sitting: SessionState) -> Future[None] | None:
        future = self._keeper.remove(sitting)
        self._forget(sitting)
        return future

    def names(self, tenant: str, turns: Sequence[ChatMessage]) -> Sequence[str]:
        return self._keeper.names(tenant, turns)

    def merge(self, tenant: str, name: str) -> None:
        self._keeper.merge(tenant, name)

    def is_behind(self, sitting: SessionState) -> bool:
        return self._keeper.is_behind(sitting)

    def claim(self, sitting: SessionState) -> None:
        self._keeper.claim(sitting)

    def rest(self, sitting: SessionState) -> None:
        self._keeper.rest(sitting)

    def close(self) -> None:
        self._keeper.close()
