"""Release, prefetch and compaction of a session's cache, on request of its owner."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from larder.core.errors import BudgetError
from larder.server.api_errors import memory_in_use
from larder.server.model_thread import CompletionQueue
from larder.server.request_finisher import FAILURES
from larder.server.serving_policy import ServingPolicy
from larder.server.session_backend.base import SessionBackend
from larder.server.session_state import SavedCache, SessionState
from larder.server.tiers.disk import LoadedCaches
from larder.server.tiers.manager import TierManager
from larder.store.ledger import Reservation


class AdminOperations:
    """Operations that move a session's cache between tiers. For the model's thread.

    Each operation returns a future, done once the session has moved; until then the session is
    busy.

    Args:
        backend_of: session backend of a policy.
    """

    def __init__(
        self,
        tiers: TierManager,
        completions: CompletionQueue,
        backend_of: Callable[[ServingPolicy], SessionBackend],
    ) -> None:
        self._tiers, self._completions = tiers, completions
        self._backend_of = backend_of

    def release(self, session: SessionState) -> Future[SessionState]:
        """Evict a session from memory, once the store has its cache or cannot take it."""
        done: Future[SessionState] = Future()
        saving = self._tiers.save(session)

        def leave(_: Future[SavedCache] | None) -> None:
            session.usage.is_answering = False
            self._tiers.evict(session)
            done.set_result(session)

        if saving is None:
            leave(None)
        else:
            session.usage.is_answering = True
            self._completions.when_done(saving, leave)
        return done

    def prefetch(self, session: SessionState) -> Future[SessionState]:
        """Bring a session's cache to the device; a session without a cache is left as it is.

        Raises:
            ApiError: 503 `overloaded`, no memory is free now.
        """
        usage = session.usage
        residency = session.residency
        done: Future[SessionState] = Future()
        saved = None if residency.is_resident else residency.saved_cache
        is_parked = residency.is_resident and residency.active is None
        if not is_parked and saved is None:
            done.set_result(session)
            return done
        started = None if saved is None else self._tiers.take_started(session, saved)
        reservation, usage.is_running = None, True  # not a candidate for its own eviction
        try:
            self._tiers.grant(session, self._backend_of(session.serving).idle_demand(session))
            if saved is not None:
                reservation = self._tiers.reserve_host(session, saved.load_bytes)
        except BudgetError as error:
            raise memory_in_use(session.name) from error
        finally:
            usage.is_running = False
        if saved is None:
            self._tiers.restore_from_host(session)
            self._tiers.shrink_to_fit(session)
            done.set_result(session)
        elif reservation is None:
            self._tiers.drop(session)
            raise memory_in_use(session.name)
        else:
            usage.is_answering = usage.is_running = True
            loading = started or self._tiers.disk.load(session, saved)
            self._completions.when_done(
                loading, partial(self._on_loaded, session, saved, reservation, done)
            )
        return done

    def compact(self, session: SessionState) -> Future[SessionState]:
        """Bring a session's cache to the device within its policy's budget, and release its slack.

        Raises:
            ApiError: 503 `overloaded`, no device memory is free now.
        """
        done: Future[SessionState] = Future()

        def give_back(prefetched: Future[SessionState]) -> None:
            try:
                self._tiers.shrink_to_fit(prefetched.result())
            except FAILURES as error:
                self._tiers.drop(session)
                done.set_exception(error)
            else:
                done.set_result(session)

        self.prefetch(session).add_done_callback(give_back)
        return done

    def _on_loaded(
        self,
        session: SessionState,
        saved: SavedCache,
        reservation: Reservation,
        future: Future[SessionState],
        loading: Future[LoadedCaches],
    ) -> None:
        session.usage.is_answering = session.usage.is_running = False
        is_loaded = loading.exception() is None
        try:
            if is_loaded:
                self._tiers.restore_from_disk(
                    session, session, saved, loading.result(), reservation
                )
                self._tiers.shrink_to_fit(session)
        except FAILURES:
            is_loaded = False
        if not is_loaded:  # it will be recomputed
            reservation.release()
            self._tiers.drop(session)
        future.set_result(session)
