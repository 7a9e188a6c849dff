"""Epoch fence: what a session's stored state means if a write found another than it expected.

A write that timed out may still take effect. So each write carries a random mark: if an unexpected
state is found and it has the mark of this server's own attempt, writing continues from it. Any
other state was written by another server and supersedes this one, even if its content is equal.
A server alone on its store, whose writes end in time, does not need this module, nor load it.
"""

from __future__ import annotations

from larder.core.errors import BudgetError, InputError, StoreFull, Superseded
from larder.server.persistence.base import WRITE_MARK_LABEL
from larder.server.session_state import SessionState
from larder.store.sessions.records import ROOT_LABEL, Record, SessionTurn
from larder.store.store import Store

MAX_REMOVALS = 4  # attempts, if other writes interfere


class EpochFence:
    """Expected epoch of each session in a store. For the thread that writes them.

    `SessionState.durability.epoch` is the epoch that the next state follows;
    `durability.write_mark` marks writes behind it whose outcome is unknown.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def adopts_own_write(self, session: SessionState) -> bool:
        """True if the newest stored state is an own write whose outcome was unknown; it is adopted.

        Raises:
            StoreError: the store cannot be read.
        """
        newest = self._own_attempt(session)
        if newest is None:
            return False
        session.durability.epoch, session.durability.write_mark = newest.epoch, ""
        return True

    def is_outdated(self, session: SessionState) -> bool:
        """True if another server has written the session since.

        Raises:
            StoreError: the store cannot be read.
        """
        moved = self._store.sessions.has_moved(
            session.tenant, session.name, session.durability.epoch
        )
        return moved and self._own_attempt(session) is None

    def remove(self, session: SessionState) -> None:
        """Delete a session from the store, also if an own write of it may still take effect, and if
        others write it meanwhile.

        Raises:
            BudgetError, StoreError: the store may still have it.
        """
        sessions = self._store.sessions
        for _ in range(MAX_REMOVALS - 1):
            try:
                sessions.remove(session.tenant, session.name)
                return
            except Superseded:
                continue
            except InputError:  # not in the store
                if not session.durability.write_mark or not self._occupies_first_epoch(session):
                    return
        sessions.remove(session.tenant, session.name)

    def _own_attempt(self, session: SessionState) -> Record | None:
        """The newest stored state, if it is an own write with unknown outcome."""
        durability = session.durability
        if not durability.write_mark:
            return None
        newest = self._store.sessions.head(session.tenant, session.name)
        if newest is None or newest.labels.get(WRITE_MARK_LABEL) != durability.write_mark:
            return None
        # Other servers copy labels to their states, so the previous epoch is compared, too; that
        # of a first state is unknown.
        return newest if durability.epoch in (0, newest.previous) else None

    def _occupies_first_epoch(self, session: SessionState) -> bool:
        """True if the first epoch is occupied, so that a delayed first write cannot take effect; an
        empty placeholder is written if necessary, to be removed by the caller."""
        nothing = SessionTurn((), b"", {ROOT_LABEL: session.root})
        try:
            self._store.sessions.append(session.tenant, session.name, nothing, 0)
        except Superseded:
            return True
        except (BudgetError, StoreFull):  # a delayed write would fail, too
            return False
        return True
