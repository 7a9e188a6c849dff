"""Contract of session persistence, its null object, and the durability levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

from larder.core.errors import LarderError
from larder.server.request import ChatMessage
from larder.server.session_info import SessionInfo
from larder.server.session_state import SavedCache, SessionState
from larder.server.transcript import CompletedTurn

ANSWERED_LABEL, PAUSES_LABEL = "answered", "pauses"  # labels of `SessionUsage` fields in records
WRITE_MARK_LABEL = "mark"  # label that identifies an attempted write


class Durability(Enum):
    """Condition for reporting the end of an answer, and what happens if it cannot be met.

    `NONE`: none. `TURN`: the turn is in the store; if the store does not accept it, the answer is
    reported as not durable. `SNAPSHOT`: as `TURN`, and the cache is in the store where the store
    accepts it. `STRICT`: the turn is in the store; if the store does not accept it, the request
    fails and the turn is rolled back.
    """

    NONE = "none"
    TURN = "turn"
    SNAPSHOT = "snapshot"
    STRICT = "strict"


@dataclass(frozen=True)
class StoredSession:
    """A session as last written to the store.

    Args:
        data: transcript, as encoded by `session_file.encode`.
        epoch: epoch of this state.
        saved_cache: the cache in the store, if there is one.
        policy: spelling of the policy of that cache.
        labels: other labels of the record.
    """

    data: bytes
    epoch: int
    saved_cache: SavedCache | None = None
    policy: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


class SessionLocks:
    """Contract of locks on sessions of a store that several servers share, and its null object for
    one server.
    """

    def acquire(self, session: SessionState) -> None:
        """Lock a session against other servers until `release`.

        Raises:
            ApiError: 409 `session_held`.
        """

    def check(self, session: SessionState) -> None:
        """Check that the lock of a session, if it has one, is not lost.

        Raises:
            ApiError: 409 `session_superseded`.
        """

    def release(self, session: SessionState) -> None:
        """Unlock a session, if it was locked: its answer is complete or has failed."""

    def is_outdated(self, session: SessionState) -> bool:
        """True if another server has written the session since, so that it must be reloaded."""
        return False


class SessionPersistence:
    """Contract of session persistence, and its null object, which stores nothing.

    `locks` are those of its sessions against other servers.
    """

    locks = SessionLocks()

    def commit(
        self, session: SessionState, turn: CompletedTurn
    ) -> Future[LarderError | None] | None:
        """Write a session that has a new turn.

        Returns:
            a future: None if the store has all turns, else the error that prevented it. It fails
                with `ApiError` if another server has written the session. Without a store: None
                instead of a future.
        """

    def load(self, tenant: str, name: str) -> StoredSession | None:
        """The stored session; None if there is none. From any thread.

        Raises:
            SessionUnreadableError: the stored transcript is damaged.
            ApiError: the session cannot be read now.
        """
        del tenant, name

    def candidates(self, tenant: str, turns: Sequence[ChatMessage]) -> Sequence[str]:
        """Names of sessions that begin with these messages. From any thread."""
        return ()

    def branches(self, tenant: str, root: str) -> Sequence[str]:
        """Names of stored sessions of this root; some may have been removed. From any thread.

        Raises:
            ApiError: the store cannot list them now.
        """
        return ()

    def list_sessions(self, tenant: str) -> Sequence[SessionInfo]:
        """All stored sessions, most recently used first. From any thread."""
        return ()

    def compact_history(self, tenant: str, name: str) -> None:
        """Allow earlier states of a session to be deleted. From any thread."""
        del tenant, name

    def pin(self, session: SessionState) -> Future[None] | None:
        """Write the pinned flag of a session; the future of the write."""

    def remove(self, session: SessionState) -> Future[None] | None:
        """Delete a session; the future of its deletion in the store."""

    def discard(self, tenant: str, name: str) -> Future[None] | None:
        """Delete a stored session that cannot be read. From any thread."""
        del tenant, name

    def close(self) -> None:
        """Finish pending work."""
