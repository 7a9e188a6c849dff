"""Where the caches of chats rest: one on the device, others in host memory.

What is parked of the one that answers counts on the host, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping

from larder.core.errors import BudgetError
from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.store.ledger import ByteLedger, Reservation, Tier


class ChatHostMemory:
    """Moves such caches. For the model's thread.

    Args:
        in_host: who has something in host memory.
        room: makes room there, if it can.
        drop: gives all caches of a session up.
    """

    def __init__(
        self,
        ledger: ByteLedger,
        purse: DeviceReservations,
        in_host: MutableMapping[int, SessionState],
        room: Callable[[SessionState, int], bool],
        drop: Callable[[SessionState], None],
    ) -> None:
        self._ledger, self._purse, self._in_host = ledger, purse, in_host
        self._room, self._drop = room, drop

    def hold(self, sitting: SessionState, count: int) -> None:
        """Speak for so many bytes of host memory, more or less than before.

        Raises:
            BudgetError: others that are in use have too much.
        """
        held = 0 if sitting.host is None else sitting.host.bytes
        if count > held:
            self._room(sitting, count - held)
        more = self._ledger.reserve(Tier.HOST, sitting.tenant, max(0, count - held))
        if sitting.host is None:
            sitting.host = more
        else:
            sitting.host.bytes += more.bytes
            sitting.host.shrink(count)
        self._in_host[sitting.key] = sitting

    def give_back(self, sitting: SessionState, count: int) -> None:
        """What was spoken for is not needed: so many bytes are, as before; 0 where nothing is."""
        assert sitting.host is not None
        sitting.host.shrink(count)
        if not sitting.has_resident_cache:
            sitting.host.release()
            sitting.host = None
            del self._in_host[sitting.key]

    def set_aside(self, sitting: SessionState, count: int) -> Reservation | None:
        """What is spoken for in host memory, and so many bytes at least, for caches to arrive in;
        None where there is no room, and all is as before."""
        assert sitting.host is not None
        try:
            self.hold(sitting, max(sitting.host.bytes, count))
        except BudgetError:
            return None
        room, sitting.host = sitting.host, None
        del self._in_host[sitting.key]
        return room

    def return_reservation(self, sitting: SessionState, room: Reservation) -> None:
        """Have what was set aside be spoken for by the session again."""
        sitting.host = room
        self._in_host[sitting.key] = sitting

    def settle(self, sitting: SessionState) -> None:
        """A turn is over: give slack back, and keep no more than what is there."""
        cache, need = sitting.active, MemoryDemand()
        if cache is not None:
            cache.compact()
            self._purse.check(sitting.key, cache.device_nbytes)
            need = MemoryDemand(
                cache.device_nbytes, max(store.device_nbytes for store in cache.stores)
            )
        self._purse.grant(sitting.key, sitting.tenant, need)
        if sitting.chat_cache is None:
            return
        try:
            self.hold(sitting, sitting.host_bytes)
        except BudgetError:
            self._drop(sitting)

    def park(self, sitting: SessionState) -> bool:
        """Have the device be free; False if there is no room for what leaves it."""
        assert sitting.chat_cache is not None
        if not self._room(sitting, sitting.device_bytes):
            return False
        self.hold(sitting, sitting.nbytes)
        sitting.chat_cache.caches.offload_active()
        self.hold(sitting, sitting.nbytes)
        return True


def idle_bytes(sitting: SessionState) -> int:
    """What a session's caches take at rest."""
    if sitting.chat_cache is not None:
        return sitting.nbytes
    stores = () if sitting.cache is None else sitting.cache.stores
    return sum(tensor.nbytes for store in stores for tensor in store.tensors())


MAX_IDLE_TRANSCRIPTS = (
    64  # sessions without a cache whose logs are in memory, because they were used lately
)


class TranscriptMemory:
    """The logs of all sessions that are in memory. For the model's thread.

    Args:
        unload: has a session of which nothing need be in memory leave it, if that can be.
    """

    def __init__(self, ledger: ByteLedger, unload: Callable[[SessionState], bool]) -> None:
        self._ledger, self._unload = ledger, unload
        self._charged: dict[int, SessionState] = {}
        self._staying: dict[int, int] = {}
        self._of: Counter[str] = Counter()

    def missing(self, sitting: SessionState) -> int:
        """Bytes that a log takes beyond what was charged for it."""
        return sitting.transcript_bytes - (0 if sitting.log is None else sitting.log.bytes)

    def exceeds_share(self, sitting: SessionState) -> bool:
        """Whether a tenant would have more that cannot leave memory than is left to others."""
        if not self._is_crowding(sitting):
            return False
        for each in self._charged.values():
            if each.written:  # since it was charged
                self._count(each, 0)
        return self._is_crowding(sitting)

    def charge(self, sitting: SessionState) -> None:
        """Charge what a log takes now.

        Raises:
            BudgetError: there is no room.
        """
        want, had = sitting.transcript_bytes, sitting.log
        more = self._ledger.reserve(Tier.HOST, sitting.tenant, max(0, self.missing(sitting)))
        if had is None:
            sitting.log = more
        else:
            had.bytes += more.bytes
            had.shrink(want)
        self._charged[sitting.key] = sitting
        self._count(sitting, self._kept_here(sitting))

    def forget(self, sitting: SessionState) -> None:
        """It is not in memory any more."""
        self._charged.pop(sitting.key, None)
        self._count(sitting, 0)
        if sitting.log is not None:
            sitting.log.release()
            sitting.log = None

    def unload_idle(self) -> None:
        """Have sessions without a cache in memory leave it, but for some that were used last."""
        resting = [each for each in self._resting() if not each.is_pinned]
        for each in resting[: max(0, len(resting) - MAX_IDLE_TRANSCRIPTS)]:
            self._unload(each)

    def unload_one(self, but: SessionState) -> bool:
        """Have one of these leave memory, the one that was used least lately, those that are pinned
        last; whether one could."""
        return any(self._unload(each) for each in self._resting() if each is not but)

    def _is_crowding(self, sitting: SessionState) -> bool:
        more = self._kept_here(sitting) - self._staying.get(sitting.key, 0)
        own, held = self._of[sitting.tenant] + more, self._of.total() + more
        return more > 0 and own > self._ledger.limit(Tier.HOST) - held

    def _kept_here(self, sitting: SessionState) -> int:
        return 0 if sitting.written else sitting.transcript_bytes

    def _count(self, sitting: SessionState, staying: int) -> None:
        self._of[sitting.tenant] += staying - self._staying.pop(sitting.key, 0)
        if staying:
            self._staying[sitting.key] = staying
        if not self._of[sitting.tenant]:
            del self._of[sitting.tenant]

    def _resting(self) -> list[SessionState]:
        """Sessions of which the log alone is in memory, and need not be."""
        resting = [each for each in self._charged.values() if each.can_leave_memory]
        resting = [each for each in resting if not each.has_resident_cache]
        return sorted(resting, key=lambda each: (each.is_pinned, each.last_used))
