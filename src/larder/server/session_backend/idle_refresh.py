"""Rebuild of caches that have grown too large, between two turns, while no request is answered.

A turn that finds its episodes rebuilt has its first token sooner. The result is the same as if the
next turn began with the rebuild, which it does with what is left.
"""

from __future__ import annotations

from collections.abc import Callable

from larder.core.errors import BudgetError
from larder.server.admission import chat_turn_demand
from larder.server.request_finisher import FAILURES
from larder.server.session_backend.chat_prefill import refresh_steps
from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.server.tiers.manager import TierManager
from larder.session.chat_cache import ChatCache

END = object()


class IdleRefresher:
    """Refreshes of idle sessions, a step at a time, in the order of their turns. For the model's
    thread.

    No cache leaves the device for one, and none of another tenant leaves host memory. A session
    whose caches leave memory meanwhile, or that is asked again, is left to its next turn.

    Args:
        grant: reserves the memory of a turn.
    """

    def __init__(
        self,
        tiers: TierManager,
        reservations: DeviceReservations,
        grant: Callable[[SessionState, MemoryDemand], None],
    ) -> None:
        self._tiers, self._reservations, self._grant = tiers, reservations, grant
        self._overdue: dict[int, SessionState] = {}

    def note(self, session: SessionState) -> None:
        """Note a session whose turn has ended, if its caches have grown too large."""
        chat_cache = session.residency.chat_cache
        if chat_cache is not None and chat_cache.is_overdue:
            self._overdue[session.key] = session

    def step(self) -> bool:
        """One step of a refresh; False if there was nothing to do."""
        for session in list(self._overdue.values()):
            if session.residency.is_saving:
                continue  # until the write has ended
            if self._goes_on(session):
                return True
            del self._overdue[session.key]
        return False

    def _goes_on(self, session: SessionState) -> bool:
        """One step of the refresh of a session; False if it has ended or is left to the next
        turn."""
        chat_cache = session.residency.chat_cache
        if chat_cache is None or not session.is_idle or session.key not in self._tiers.on_device:
            return False
        session.usage.is_running = True  # not a candidate for its own eviction
        try:
            return self._advance(session, chat_cache)
        except FAILURES:
            self._tiers.drop(session)  # the next turn reads it again
            return False
        finally:
            session.usage.is_running = False

    def _advance(self, session: SessionState, chat_cache: ChatCache) -> bool:
        """`_goes_on` of a session that can go on."""
        try:
            self._reserve(session)
        except BudgetError:
            chat_cache.stop_refresh()
            self._end(session)
            return False
        if next(refresh_steps(session, chat_cache), END) is END:
            self._end(session)
            return False
        residency = session.residency
        self._reservations.check(session.key, max(residency.device_bytes, residency.rebuild_bytes))
        return True

    def _reserve(self, session: SessionState) -> None:
        """Memory of a refresh.

        Raises:
            BudgetError: it is not free.
        """
        caches = session.residency.caches
        assert caches is not None
        read = len(session.transcript.ids)
        demand = chat_turn_demand(session.serving, read, 0, 0, len(caches))
        if self._reservations.missing_bytes(session.key, session.tenant, demand):
            raise BudgetError("The device has no room for a refresh.")
        with self._tiers.evicting_only(session.tenant):
            self._grant(session, demand)

    def _end(self, session: SessionState) -> None:
        """Bring the cache that answered last back to the device, and release the rest."""
        residency = session.residency
        held = residency.resident_caches
        assert held is not None
        residency.episode = min(residency.episode, len(held.caches) - 1)
        held.caches.activate(residency.episode)
        session.update_occupancy()
        self._tiers.shrink_to_fit(session)
