"""Caches that are brought back before they are asked for, while other requests are answered.

Pan et al., "KVFlow: Efficient Prefix Caching for Accelerating LLM-Based Multi-Agent Workflows"
(2025), arXiv:2507.07400, section 3.2: caches of the agents that a workflow runs next are fetched in
the background. What differs: they come from the store, too; on the device none takes the place of
a cache that is due as early; and no cache of another tenant leaves memory for them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from larder.core.errors import BudgetError, LarderError
from larder.server.model_thread import CompletionQueue
from larder.server.session_state import SessionState
from larder.server.tiers.device import MemoryDemand
from larder.server.tiers.disk import LoadedCaches, StartedLoad, install_caches
from larder.server.tiers.manager import TierManager

# Errors of a prefetch that leave its session to the request, such as an accelerator without memory.
FAILURES = (LarderError, RuntimeError, MemoryError)


class CachePrefetcher:
    """Prefetch of caches ahead of their requests. For the model's thread.

    Args:
        idle_demand: upper bound of the device memory of an idle session.
    """

    def __init__(
        self,
        tiers: TierManager,
        completions: CompletionQueue,
        idle_demand: Callable[[SessionState], MemoryDemand],
    ) -> None:
        self._tiers, self._completions, self._idle_demand = tiers, completions, idle_demand
        self.prefetched = 0

    def prefetch(self, session: SessionState) -> None:
        """Bring an idle session's cache to the device; what has no room there stays in host
        memory, or in the store."""
        residency = session.residency
        if (
            not session.is_idle
            or residency.active is not None
            or session.key in self._tiers.started
        ):
            return
        with self._tiers.evicting_only(session.tenant):
            self._fetch(session)

    def _fetch(self, session: SessionState) -> None:
        residency = session.residency
        if residency.is_resident:
            self._activate(session)
        elif (saved := residency.saved_cache) is not None:
            reservation = self._tiers.reserve_host(session, saved.load_bytes)
            if reservation is not None:
                load = StartedLoad(saved, reservation, self._tiers.disk.load(session, saved))
                self._tiers.started[session.key] = load
                self._completions.when_done(load.future, partial(self._on_loaded, session, load))

    def _on_loaded(
        self, session: SessionState, load: StartedLoad, future: Future[LoadedCaches]
    ) -> None:
        if self._tiers.started.get(session.key) is not load:
            return  # a request has taken it
        del self._tiers.started[session.key]
        residency = session.residency
        is_wanted = session.is_idle and not residency.is_resident
        if (
            future.exception() is not None
            or not is_wanted
            or residency.saved_cache is not load.saved
        ):
            load.reservation.release()  # the request loads or reads it itself
            return
        try:
            install_caches(session, session, load.saved, future.result(), load.reservation)
        except FAILURES as error:
            if isinstance(error, LarderError):
                self._tiers.disk.reject(error)
            load.reservation.release()
            return
        self._tiers.in_host[session.key] = session
        with self._tiers.evicting_only(session.tenant):
            self._activate(session)

    def _activate(self, session: SessionState) -> None:
        """Bring a cache from host memory to the device, if it displaces none that is due as
        early."""
        demand, usage = self._idle_demand(session), session.usage
        if not self._tiers.displaces_later(session, demand):
            return
        usage.is_running = True  # not a candidate for its own eviction
        try:
            self._tiers.grant(session, demand)
            self._tiers.restore_from_host(session)
            session.update_occupancy()
            self._tiers.shrink_to_fit(session)
            self.prefetched += 1
        except BudgetError:
            pass  # it stays in host memory
        except FAILURES:
            self._tiers.drop(session)  # the request loads or reads it itself
        finally:
            usage.is_running = False
