"""What becomes of turns, in memory and where sessions are kept for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from larder.core.errors import LarderError
from larder.server.keeper import Keeper, Recalled
from larder.server.request import Turn
from larder.server.sessions import Sessions
from larder.server.sitting import Said, Sitting


class Directory(Keeper):
    """Keeps the index of sessions, and hands turns on to whoever keeps them for good."""

    def __init__(
        self, sessions: Sessions, forget: Callable[[Sitting], None], keeper: Keeper
    ) -> None:
        self._sessions, self._forget, self._keeper = sessions, forget, keeper

    def commit(self, sitting: Sitting, said: Said) -> Future[LarderError | None] | None:
        if len(sitting.said) == 1 or sitting.epoch == 1:
            self._sessions.remember(sitting)
        return self._keeper.commit(sitting, said)

    def abandon(self, sitting: Sitting) -> None:
        self._forget(sitting)
        self._keeper.abandon(sitting)

    def recall(self, tenant: str, name: str) -> Recalled | None:
        return self._keeper.recall(tenant, name)

    def remove(self, sitting: Sitting) -> Future[None] | None:
        future = self._keeper.remove(sitting)
        self._forget(sitting)
        return future

    def names(self, tenant: str, turns: Sequence[Turn]) -> Sequence[str]:
        return self._keeper.names(tenant, turns)

    def merge(self, tenant: str, name: str) -> None:
        self._keeper.merge(tenant, name)

    def is_behind(self, sitting: Sitting) -> bool:
        return self._keeper.is_behind(sitting)

    def claim(self, sitting: Sitting) -> None:
        self._keeper.claim(sitting)

    def rest(self, sitting: Sitting) -> None:
        self._keeper.rest(sitting)

    def close(self) -> None:
        self._keeper.close()
