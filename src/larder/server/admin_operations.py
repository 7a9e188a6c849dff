"""What owners do with a session's cache: let it go, have it back, have it made smaller."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from larder.core.errors import BudgetError
from larder.server.admission import chat_turn_demand
from larder.server.api_errors import overloaded
from larder.server.model_thread import CompletionQueue
from larder.server.scheduler import FAILURES
from larder.server.session_state import SavedCache, SessionState
from larder.server.tiers.device import MemoryDemand
from larder.server.tiers.disk import WRITE_COPIES, LoadedCaches
from larder.server.tiers.manager import TierManager
from larder.store.ledger import Reservation


def idle_demand(sitting: SessionState) -> MemoryDemand:
    """The most that a session takes on the device that does nothing there."""
    rule, held = sitting.rule, sitting.held
    return (
        chat_turn_demand(rule, held.read, 0, 0, 1)
        if rule.is_chat
        else rule.lossless_turn_demand(held, held.read, 0)
    )


class AdminOperations:
    """For the model's thread; what it returns is done once the session has moved.

    A session that is on its way is busy.

    Args:
        waiting: how many requests wait.
    """

    def __init__(
        self, tiers: TierManager, news: CompletionQueue, waiting: Callable[[], int]
    ) -> None:
        self._tiers, self._news, self._waiting = tiers, news, waiting

    def release(self, sitting: SessionState) -> Future[SessionState]:
        """Have a session leave memory, once the store has its cache or will never have it."""
        done: Future[SessionState] = Future()
        saving = self._tiers.save(sitting)

        def leave(_: Future[SavedCache] | None) -> None:
            sitting.is_answering = False
            self._tiers.evict(sitting)
            done.set_result(sitting)

        if saving is None:
            leave(None)
        else:
            sitting.is_answering = True
            self._news.hear(saving, leave)
        return done

    def prefetch(self, sitting: SessionState) -> Future[SessionState]:
        """Bring a cache back to the device; what is nowhere stays so.

        Raises:
            Refusal: there is no room now.
        """
        done: Future[SessionState] = Future()
        kept = None if sitting.has_resident_cache else sitting.kept
        is_parked = sitting.has_resident_cache and sitting.active is None
        if not is_parked and kept is None:
            done.set_result(sitting)
            return done
        room, sitting.is_running = None, True  # others leave for it, not it itself
        try:
            self._tiers.grant(sitting, idle_demand(sitting))
            if kept is not None:
                room = self._tiers.host_room(sitting, kept.nbytes + WRITE_COPIES * kept.cache_bytes)
        except BudgetError as error:
            raise overloaded(self._waiting()) from error
        finally:
            sitting.is_running = False
        if kept is None:
            self._tiers.restore_from_host(sitting)
            self._tiers.settle(sitting)
            done.set_result(sitting)
        elif room is None:
            self._tiers.drop(sitting)
            raise overloaded(self._waiting())
        else:
            sitting.is_answering = sitting.is_running = True
            loading = self._tiers.vault.load(sitting, kept)
            self._news.hear(loading, partial(self._arrived, sitting, kept, room, done))
        return done

    def compact(self, sitting: SessionState) -> Future[SessionState]:
        """Bring a cache to the device, where it rests within its budget, and give slack back.

        Raises:
            Refusal: there is no room for it on the device now.
        """
        done: Future[SessionState] = Future()

        def give_back(there: Future[SessionState]) -> None:
            try:
                self._tiers.settle(there.result())
            except FAILURES as error:
                self._tiers.drop(sitting)
                done.set_exception(error)
            else:
                done.set_result(sitting)

        self.prefetch(sitting).add_done_callback(give_back)
        return done

    def _arrived(
        self,
        sitting: SessionState,
        kept: SavedCache,
        room: Reservation,
        done: Future[SessionState],
        loading: Future[LoadedCaches],
    ) -> None:
        sitting.is_answering = sitting.is_running = False
        is_there = loading.exception() is None
        try:
            if is_there:
                self._tiers.take(sitting, sitting, kept, loading.result(), room)
                self._tiers.settle(sitting)
        except FAILURES:
            is_there = False
        if not is_there:  # its text will be read again
            room.release()
            self._tiers.drop(sitting)
        done.set_result(sitting)
