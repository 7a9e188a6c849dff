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
from larder.server.news import News
from larder.server.sitting import Kept, Sitting
from larder.server.vault import Vault
from larder.store.ledger import ByteLedger, Reservation, Tier

COPIES = 2  # of a cache that is written: its state, and the blob in the making


class Stowing:
    """For the model's thread; the store is written by another one.

    Args:
        ended: told whenever a writing is over.
    """

    def __init__(
        self, ledger: ByteLedger, vault: Vault, news: News, ended: Callable[[], None]
    ) -> None:
        self._ledger, self._vault, self._news, self._ended = ledger, vault, news, ended
        self._late: dict[int, list[Reservation]] = {}
        self._under_way: dict[int, Future[Kept]] = {}
        self.saved = 0

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return bool(self._late)

    def under_way(self, sitting: Sitting) -> Future[Kept] | None:
        """The writing of a session's cache, where it is being written."""
        return self._under_way.get(sitting.key)

    def wants(self, sitting: Sitting) -> bool:
        """Whether a cache that is not in use may be written, and was not."""
        is_idle = not (sitting.is_answering or sitting.is_running or sitting.is_saving)
        return is_idle and self.needs(sitting) and not sitting.owed

    def needs(self, sitting: Sitting) -> bool:
        """Whether the store could have a cache, but has not."""
        is_written = sitting.written > 0 and sitting.logged == len(sitting.said) > 0
        if sitting.cabinet is not None:  # it is read again
            return False
        is_refused = sitting.unkept == len(sitting.read)
        return self._vault.is_open and is_written and not sitting.is_saved and not is_refused

    def start(self, sitting: Sitting) -> Future[Kept] | None:
        """Write a session's cache; None where there is no room for the copies that takes."""
        cache = sitting.cache
        if cache is None:
            assert sitting.parked is not None
            cache = sitting.parked.shown(sitting.rule.desk.decoder.spec)
        try:
            room = self._ledger.reserve(Tier.HOST, sitting.tenant, COPIES * sitting.nbytes)
        except BudgetError:
            return None
        return self._begin(sitting, cache, room)

    def hold(self, sitting: Sitting, reservation: Reservation) -> None:
        """Give memory back once the session's writing is over; at once where none is on its way."""
        if sitting.is_saving:
            self._late[sitting.key].append(reservation)
        else:
            reservation.release()

    def _begin(self, sitting: Sitting, cache: SequenceCache, room: Reservation) -> Future[Kept]:
        sitting.is_saving = True
        sitting.owed += 1
        self._late[sitting.key] = [room]
        future = self._under_way[sitting.key] = self._vault.save(sitting, cache)
        self._news.hear(future, partial(self._over, sitting, len(sitting.read)))
        return future

    def _over(self, sitting: Sitting, tokens: int, future: Future[Kept]) -> None:
        sitting.is_saving = False
        sitting.owed -= 1
        del self._under_way[sitting.key]
        for reservation in self._late.pop(sitting.key):
            reservation.release()
        if future.exception() is None:
            sitting.kept, sitting.unkept = future.result(), -1
            self.saved += 1
        else:
            sitting.unkept = tokens
        self._ended()
