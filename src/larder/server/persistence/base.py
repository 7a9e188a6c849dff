"""Who keeps what was said beyond the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

from larder.core.errors import LarderError
from larder.server.engine_client import SessionInfo
from larder.server.request import ChatMessage
from larder.server.session_state import CompletedTurn, SavedCache, SessionState

ANSWERED_LABEL, PAUSES_LABEL = "answered", "pauses"  # labels: `SessionState` says what of


class Durability(Enum):
    """What must be in the store before the end of an answer is told, and what if it cannot be.

    `NONE`: nothing. `TURN`: the turn; where the store does not take it, the answer is told all the
    same, as one that is not durable. `SNAPSHOT`: as `TURN`, and the cache where the store takes it.
    `STRICT`: the turn; where the store does not take it, the request fails and there is no turn.
    """

    NONE = "none"
    TURN = "turn"
    SNAPSHOT = "snapshot"
    STRICT = "strict"


@dataclass(frozen=True)
class StoredSession:
    """A session as it was written last.

    Args:
        data: as `archive.told` has told it.
        epoch: under which it was written.
        kept: what is kept of its cache.
        policy: of that cache.
        labels: what else was noted.
    """

    data: bytes
    epoch: int
    kept: SavedCache | None = None
    policy: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


class SessionPersistence:
    """Told of what becomes of turns; this one keeps nothing beyond the process."""

    def commit(
        self, sitting: SessionState, said: CompletedTurn
    ) -> Future[LarderError | None] | None:
        """Have a session with a new turn be written.

        Returns:
            what is done once that is over: with None where the store has all turns, or with why it
            does not. It fails as `Refusal` where somebody else has gone on with the session. None
            where nothing is kept.
        """

    def discard_new(self, sitting: SessionState) -> None:
        """A session that never had a turn, or is not the newest, need not be in memory."""

    def recall(self, tenant: str, name: str) -> StoredSession | None:
        """What is kept of a session; None where there is none. From any thread.

        Raises:
            Unreadable: what is kept of it is damaged.
            Refusal: it cannot be had now.
        """
        del tenant, name

    def names(self, tenant: str, turns: Sequence[ChatMessage]) -> Sequence[str]:
        """Sessions that began as these messages do. From any thread."""
        del tenant, turns
        return ()

    def branches(self, tenant: str, root: str) -> Sequence[str]:
        """Sessions that are kept and began as this one does; some may be gone. From any thread.

        Raises:
            Refusal: it cannot be told.
        """
        del tenant, root
        return ()

    def list_sessions(self, tenant: str) -> Sequence[SessionInfo]:
        """All that are kept, the one that was used last first. From any thread."""
        del tenant
        return ()

    def merge(self, tenant: str, name: str) -> None:
        """Earlier states of a session are not needed any more. From any thread."""
        del tenant, name

    def pin(self, sitting: SessionState) -> Future[None] | None:
        """Whether a session is pinned has changed; what is done once that is written."""

    def remove(self, sitting: SessionState) -> Future[None] | None:
        """Whoever it belongs to wants it gone; what is done once it is."""

    def discard(self, tenant: str, name: str) -> Future[None] | None:
        """As `remove`, of a session that is kept and cannot be had. From any thread."""
        del tenant, name

    def is_behind(self, sitting: SessionState) -> bool:
        """Whether somebody else has gone on with it, so that it must be had anew."""
        del sitting
        return False

    def claim(self, sitting: SessionState) -> None:
        """From now on until `rest` nobody else may answer in it.

        Raises:
            Refusal: somebody else does.
        """

    def rest(self, sitting: SessionState) -> None:
        """Its answer is complete, or given up; also of one that was never claimed."""

    def close(self) -> None:
        """Finish what is on its way."""
