"""States of sessions that are written one behind the other, also behind one that nobody heard of.

A write that is given up as too late may come about after all. So each bears a mark: what is found
where another state was expected is gone on from if it is the very one that was tried here. Whatever
else was written meanwhile supersedes, also where it says the same or has been gone back to.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from larder.core.errors import BudgetError, InputError, StoreFull, Superseded
from larder.server.session_state import SessionState
from larder.store.sessions.records import ROOT_LABEL, Record
from larder.store.sessions.turn_store import SessionTurn
from larder.store.store import Store

WRITE_MARK_LABEL = "mark"  # the label by which a write is known
MARK_BYTES = 8
MAX_REMOVALS = 4  # times that a session is removed behind which something was written meanwhile


class EpochFence:
    """Knows where sessions stand in a store, for the thread that writes them.

    `Sitting.written` is the epoch that the next state follows, `Sitting.tried` the mark of those
    that were tried behind it and may be there.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(
        self, sitting: SessionState, write: Callable[[int, Mapping[str, str]], Record]
    ) -> Record:
        """Have a state be the session's newest.

        Args:
            write: is given the epoch that the state follows, and labels for it.

        Raises:
            Superseded: somebody else has written the session meanwhile.
            BudgetError, StoreError: it is not kept, or it is and nobody has heard of it.
        """
        try:
            return self._tried(sitting, write)
        except Superseded:
            if not self.catches_up(sitting):
                raise
        return self._tried(sitting, write)

    def catches_up(self, sitting: SessionState) -> bool:
        """Whether the newest state is one that was given up here: from now on that is known.

        Raises:
            StoreError: it cannot be told.
        """
        newest = self._own(sitting)
        if newest is None:
            return False
        sitting.written, sitting.write_mark = newest.epoch, ""
        return True

    def is_behind(self, sitting: SessionState) -> bool:
        """Whether somebody else has written the session meanwhile.

        Raises:
            StoreError: it cannot be told.
        """
        moved = self._store.sessions.has_moved(sitting.tenant, sitting.name, sitting.written)
        return moved and self._own(sitting) is None

    def remove(self, sitting: SessionState) -> None:
        """Have the store forget a session, also where it is to come about yet.

        Raises:
            BudgetError, StoreError: the store may have it.
        """
        sessions, own = self._store.sessions, (sitting.tenant, sitting.name)
        for _ in range(MAX_REMOVALS - 1):
            try:
                sessions.remove(*own)
                return
            except Superseded:
                continue
            except InputError:  # there is none
                if not sitting.write_mark or not self._forestalls(sitting):
                    return
        sessions.remove(*own)

    def _tried(
        self, sitting: SessionState, write: Callable[[int, Mapping[str, str]], Record]
    ) -> Record:
        sitting.write_mark = sitting.write_mark or secrets.token_hex(MARK_BYTES)
        record = write(sitting.written, {WRITE_MARK_LABEL: sitting.write_mark})
        sitting.written, sitting.write_mark = record.epoch, ""
        return record

    def _own(self, sitting: SessionState) -> Record | None:
        """The newest state, where it is one that was tried here behind what is known."""
        if not sitting.write_mark:
            return None
        newest = self._store.turns.head(sitting.tenant, sitting.name)
        if newest is None or newest.labels.get(WRITE_MARK_LABEL) != sitting.write_mark:
            return None
        # Labels go on to states that others make of it. Where a session begins is not known before.
        return newest if sitting.written in (0, newest.previous) else None

    def _forestalls(self, sitting: SessionState) -> bool:
        """Whether the place of a first state that may come about yet is taken; if need be by it.

        What takes it says nothing, and is to be removed."""
        nothing = SessionTurn((), b"", {ROOT_LABEL: sitting.root})
        try:
            self._store.turns.append(sitting.tenant, sitting.name, nothing, 0)
        except Superseded:
            return True
        except (BudgetError, StoreFull):  # so it does not come about either
            return False
        return True
