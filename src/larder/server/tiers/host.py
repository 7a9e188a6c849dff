"""Where the caches of chats rest: one on the device, others in host memory.

What is parked of the one that answers counts on the host, too.
"""

from __future__ import annotations

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
        if not sitting.is_in_memory:
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

    def give(self, sitting: SessionState, room: Reservation) -> None:
        """Have what was set aside be spoken for by the session again."""
        sitting.host = room
        self._in_host[sitting.key] = sitting

    def settle(self, sitting: SessionState) -> None:
        """A turn is over: give slack back, and keep no more than what is there."""
        cache, need = sitting.active, MemoryDemand()
        if cache is not None:
            cache.compact()
            self._purse.check(sitting.key, cache.fast_nbytes)
            need = MemoryDemand(cache.fast_nbytes, max(store.fast_nbytes for store in cache.stores))
        self._purse.grant(sitting.key, sitting.tenant, need)
        if sitting.cabinet is None:
            return
        try:
            self.hold(sitting, sitting.host_bytes)
        except BudgetError:
            self._drop(sitting)

    def park(self, sitting: SessionState) -> bool:
        """Have the device be free; False if there is no room for what leaves it."""
        assert sitting.cabinet is not None
        if not self._room(sitting, sitting.device_bytes):
            return False
        self.hold(sitting, sitting.nbytes)
        sitting.cabinet.shelf.rest()
        self.hold(sitting, sitting.nbytes)
        return True


def idle_bytes(sitting: SessionState) -> int:
    """What a session's caches take at rest."""
    if sitting.cabinet is not None:
        return sitting.nbytes
    stores = () if sitting.cache is None else sitting.cache.stores
    return sum(tensor.nbytes for store in stores for tensor in store.tensors())
