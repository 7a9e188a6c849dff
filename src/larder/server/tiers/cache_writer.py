"""Caches on their way from host memory to the store, one at a time.

What is being written holds two copies more for a moment; they are reserved before it begins. The
memory of a cache that is revived or dropped meanwhile is given back when its writing is over.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError
from larder.server.completion_queue import CompletionQueue
from larder.server.session_backend.chat_snapshot import (
    encode_chat_state,
    has_all_turns,
    restore_chat,
)
from larder.server.session_state import SavedCache, SessionState
from larder.server.tiers.disk import DiskTier, LoadedCaches
from larder.session.caches import offload
from larder.store.ledger import ByteLedger, Reservation, Tier

WRITE_COPIES = 2  # of a cache that is written: its state, and the blob in the making


def write_memory_bytes(sitting: SessionState) -> int:
    """Host memory that it takes to write a session's caches, beside them.

    Those of a chat are written one after the other. As many bytes as it has may be held twice
    meanwhile: what is on the device, and what is wanted there.
    """
    if sitting.cabinet is None:
        return WRITE_COPIES * sitting.nbytes
    largest = max(held.nbytes for held in sitting.cabinet.shelf.holdings())
    return sitting.nbytes + WRITE_COPIES * largest


class DiskTierWriter:
    """For the model's thread; the store is written by another one.

    Args:
        ended: told whenever a writing is over.
    """

    def __init__(
        self, ledger: ByteLedger, vault: DiskTier, news: CompletionQueue, ended: Callable[[], None]
    ) -> None:
        self._ledger, self._vault, self._news, self._ended = ledger, vault, news, ended
        self._late: dict[int, list[Reservation]] = {}
        self._under_way: dict[int, Future[SavedCache]] = {}
        self.saved = 0

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return bool(self._late)

    def under_way(self, sitting: SessionState) -> Future[SavedCache] | None:
        """The writing of a session's cache, where it is being written."""
        return self._under_way.get(sitting.key)

    def soon(self, count: int) -> int:
        """What a writing takes that can begin now; nothing where none can."""
        return 0 if self.is_busy or not self._vault.is_open else count

    def wants(self, sitting: SessionState) -> bool:
        """Whether a cache that is not in use may be written, and was not."""
        is_idle = not (sitting.is_answering or sitting.is_running or sitting.is_saving)
        return is_idle and self.needs(sitting) and not sitting.owed

    def needs(self, sitting: SessionState) -> bool:
        """Whether the store could have a cache, but has not."""
        if not sitting.is_in_memory:  # who asks for memory stands in it before there is a cache
            return False
        is_written = sitting.written > 0 and sitting.logged == len(sitting.said) > 0
        if sitting.cabinet is not None and not has_all_turns(sitting):
            return False
        is_refused = sitting.unkept == len(sitting.read)
        return self._vault.is_open and is_written and not sitting.is_saved and not is_refused

    def start(self, sitting: SessionState) -> Future[SavedCache] | None:
        """Write a session's cache; None where there is no room for the copies that takes."""
        try:
            room = self._ledger.reserve(Tier.HOST, sitting.tenant, write_memory_bytes(sitting))
        except BudgetError:
            return None
        return self._begin(sitting, room)

    def hold(self, sitting: SessionState, reservation: Reservation) -> None:
        """Give memory back once the session's writing is over; at once where none is on its way."""
        if sitting.is_saving:
            self._late[sitting.key].append(reservation)
        else:
            reservation.release()

    def _begin(self, sitting: SessionState, room: Reservation) -> Future[SavedCache]:
        cabinet = sitting.cabinet
        beside = None if cabinet is None else encode_chat_state(sitting)
        caches = (_read_only_cache(sitting),) if cabinet is None else cabinet.shelf.lend()
        sitting.is_saving = True
        sitting.owed += 1
        self._late[sitting.key] = [room]
        future = self._under_way[sitting.key] = self._vault.save(sitting, caches, beside)
        self._news.hear(future, partial(self._over, sitting, len(sitting.read)))
        return future

    def _over(self, sitting: SessionState, tokens: int, future: Future[SavedCache]) -> None:
        sitting.is_saving = False
        sitting.owed -= 1
        if sitting.cabinet is not None:
            sitting.cabinet.shelf.returned()
        del self._under_way[sitting.key]
        for reservation in self._late.pop(sitting.key):
            reservation.release()
        if future.exception() is None:
            sitting.kept, sitting.unkept = future.result(), -1
            self.saved += 1
        else:
            sitting.unkept = tokens
        self._ended()


def install_caches(
    sitting: SessionState,
    source: SessionState,
    kept: SavedCache,
    fetched: LoadedCaches,
    room: Reservation,
) -> None:
    """Have caches that came back be those of a session, at rest in host memory.

    Args:
        source, room: as `Tiers.take` has them.

    Raises:
        Damaged: they are not those of a chat; nothing has changed.
    """
    read = source.ids[: kept.tokens]
    if sitting.rule.is_chat:
        restore_chat(sitting, read, fetched.caches, fetched.beside)
    else:
        sitting.parked = offload(fetched.caches[0])
        room.shrink(sitting.parked.nbytes)
    sitting.host, sitting.read, sitting.settled = room, read, kept.settled
    sitting.is_coded = kept.is_coded


def _read_only_cache(sitting: SessionState) -> SequenceCache:
    """A session's cache, to be looked at."""
    if sitting.cache is not None:
        return sitting.cache
    assert sitting.parked is not None
    return sitting.parked.shown(sitting.rule.desk.decoder.spec)
