"""Where caches rest: on the device, in host memory, or nowhere, so that their text is read again.

What was used least recently leaves first, or whoever another rule of eviction names. Everything is
reserved before it is there; what does not fit anywhere is dropped, never kept anyway.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable

from larder.server.budget import Need, Purse
from larder.server.sitting import ID, Sitting
from larder.session.shelf import park
from larder.store.candidates import Candidate, Candidates
from larder.store.eviction.base import Eviction
from larder.store.ledger import NOBODY, ByteLedger, Tier

FOREVER = float("inf")


class Tiers:
    """Moves the caches of sessions. For the model's thread.

    `parked` and `restored` count moves by tier; `dropped` are caches that were given up.

    Args:
        rule: who leaves first.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        ledger: ByteLedger,
        purse: Purse,
        rule: Eviction,
        clock: Callable[[], float],
    ) -> None:
        self._ledger, self._purse, self._rule = ledger, purse, rule
        self._clock = clock
        self.on_device: dict[int, Sitting] = {}
        self.in_host: dict[int, Sitting] = {}
        self.parked: Counter[str] = Counter()
        self.restored: Counter[str] = Counter()
        self.dropped = 0

    def grant(self, sitting: Sitting, need: Need) -> None:
        """Speak for device memory, for which sessions that nobody waits for may have to leave.

        Raises:
            BudgetError: those that are left are all in use; what has left stays where it is now.
        """
        missing = self._purse.missing(sitting.key, sitting.tenant, need)
        while missing and self._leave_device(sitting, need, missing):
            missing = self._purse.missing(sitting.key, sitting.tenant, need)
        self._purse.grant(sitting.key, sitting.tenant, need)
        self.on_device[sitting.key] = sitting

    def settle(self, sitting: Sitting) -> None:
        """A turn is over: give slack back, and keep no more than what is there."""
        assert sitting.cache is not None
        sitting.cache.compact()
        self._purse.check(sitting.key, sitting.cache.nbytes)
        passing = max(store.nbytes for store in sitting.cache.stores)
        self._purse.grant(sitting.key, sitting.tenant, Need(sitting.cache.nbytes, passing))

    def revive(self, sitting: Sitting) -> None:
        """Bring a parked cache back to the device, which was granted before."""
        assert sitting.parked is not None
        parked, sitting.parked = sitting.parked, None
        try:
            sitting.cache = parked.revived(sitting.rule.desk.decoder.spec)
        finally:
            self._give_host_back(sitting)
        self.restored["host"] += 1

    def park(self, sitting: Sitting) -> bool:
        """Move a cache from the device to host memory; False if there is no room, and it stays."""
        cache = sitting.cache
        assert cache is not None
        room = sum(tensor.nbytes for store in cache.stores for tensor in store.tensors())
        if not self._host_room(sitting, room):
            return False
        reservation = self._ledger.reserve(Tier.HOST, sitting.tenant, room)
        sitting.parked, sitting.cache = park(cache), None
        reservation.shrink(sitting.parked.nbytes)
        sitting.host = reservation
        self.in_host[sitting.key] = sitting
        self._leave(sitting)
        self.parked["host"] += 1
        return True

    def drop(self, sitting: Sitting) -> None:
        """Give a cache up, wherever it is: its text will be read again."""
        if sitting.cache is not None or sitting.parked is not None:
            self.dropped += 1
        sitting.cache = sitting.parked = None
        sitting.read, sitting.settled, sitting.is_lossless = array(ID), 0, True
        self._give_host_back(sitting)
        self._leave(sitting)

    def weigh(self, sitting: Sitting) -> bool:
        """Charge what a session's log takes now; False if it does not even fit without caches."""
        want, had = sitting.log_bytes, sitting.log
        held = 0 if had is None else had.bytes
        if not self._host_room(sitting, want - held):
            return False
        more = self._ledger.reserve(Tier.HOST, sitting.tenant, max(0, want - held))
        if had is None:
            sitting.log = more
        else:
            had.bytes += more.bytes
            had.shrink(want)
        return True

    def forget(self, sitting: Sitting) -> None:
        """A session is no more: everything of it goes."""
        self.drop(sitting)
        if sitting.log is not None:
            sitting.log.release()
            sitting.log = None

    def lower(self, tier: Tier, count: int) -> int:
        """Set a tier's budget, and have sessions leave until it holds; bytes still above it."""
        above = self._ledger.lower(tier, count)
        held = self.on_device if tier is Tier.DEVICE else self.in_host
        while above > 0 and (leaving := self._first(held.values(), None, above)):
            for sitting in leaving:
                if tier is Tier.HOST or not self.park(sitting):
                    self.drop(sitting)
            above = self._ledger.used(tier) - count
        return max(0, above)

    def _leave_device(self, sitting: Sitting, need: Need, missing: int) -> bool:
        """Have idle sessions leave the device; whether any did.

        Where all tenants together have room, only the tenant's own need leave.
        """
        is_own = not self._purse.missing(sitting.key, NOBODY, need)
        whose = sitting.tenant if is_own else None
        leaving = self._first(self.on_device.values(), sitting, missing, whose)
        for each in leaving:
            if not self.park(each):
                self.drop(each)
        return bool(leaving)

    def _host_room(self, sitting: Sitting, count: int) -> bool:
        """Make room in host memory, by dropping caches that were used least."""
        limit = self._ledger.limit(Tier.HOST)
        if count > min(limit, self._ledger.tenant_limit(Tier.HOST, sitting.tenant)):
            return False
        while (missing := count - self._ledger.room(Tier.HOST, sitting.tenant)) > 0:
            is_own = limit - self._ledger.used(Tier.HOST) >= count
            whose = sitting.tenant if is_own else None
            leaving = self._first(self.in_host.values(), sitting, missing, whose)
            for each in leaving:
                self.drop(each)
            if not leaving:
                return False
        return True

    def _first(
        self,
        held: Iterable[Sitting],
        but: Sitting | None,
        missing: int,
        tenant: str | None = None,
    ) -> list[Sitting]:
        """Who leaves for so many bytes."""
        idle = [each for each in held if not each.is_running and each is not but]
        idle = [each for each in idle if tenant in (None, each.tenant)]
        told = Candidates.of([self._candidate(each) for each in idle])
        return [idle[row] for row in self._rule.leaving(told, self._clock(), missing).rows]

    def _candidate(self, sitting: Sitting) -> Candidate:
        parked = 0 if sitting.parked is None else sitting.parked.nbytes
        return Candidate(
            name=str(sitting.key),
            bytes=max(1, self._purse.bytes_of(sitting.key) + parked),
            seconds=float(len(sitting.read)),
            last_used=sitting.last_used,
            uses=sitting.uses,
            session=str(sitting.key),
            pinned_until=FOREVER if sitting.is_pinned else -FOREVER,
        )

    def _leave(self, sitting: Sitting) -> None:
        self._purse.give_back(sitting.key)
        self.on_device.pop(sitting.key, None)

    def _give_host_back(self, sitting: Sitting) -> None:
        self.in_host.pop(sitting.key, None)
        if sitting.host is not None:
            sitting.host.release()
            sitting.host = None
