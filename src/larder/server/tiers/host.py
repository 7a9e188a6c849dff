"""Host tier (swap space): memory reserved for chat caches and for transcripts.

Of a chat's caches one is on the device, the others in host memory. Entries that the active one has
offloaded count as host memory, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from time import perf_counter

from larder.core.errors import BudgetError
from larder.server.session_state import SessionState
from larder.store.ledger import ByteLedger, Reservation, Tier

MAX_IDLE_TRANSCRIPTS = 64  # recently used sessions without a cache whose transcripts stay in memory
PROBE_INTERVAL = 16  # decisions after which a slow move is measured again


class ChatHostMemory:
    """Host memory of chat caches. For the model's thread.

    Args:
        in_host: sessions with reservations in host memory.
        room: makes room there, if possible.
    """

    def __init__(
        self,
        ledger: ByteLedger,
        in_host: MutableMapping[int, SessionState],
        room: Callable[[SessionState, int], bool],
    ) -> None:
        self._ledger, self._in_host, self._room = ledger, in_host, room

    def reserve(self, session: SessionState, count: int) -> None:
        """Set the session's host reservation, larger or smaller than before.

        Raises:
            BudgetError: sessions in use hold too much.
        """
        residency = session.residency
        reserved = residency.reserved_bytes
        if count > reserved:
            self._room(session, count - reserved)
        extra = self._ledger.reserve(Tier.HOST, session.tenant, max(0, count - reserved))
        if residency.reservation is None:
            residency.reservation = extra
        else:
            residency.reservation.bytes += extra.bytes
            residency.reservation.shrink(count)
        self._in_host[session.key] = session

    def shrink(self, session: SessionState, count: int) -> None:
        """Reduce the session's reservation to `count` bytes; without caches it is released."""
        residency = session.residency
        assert residency.reservation is not None
        residency.reservation.shrink(count)
        if not residency.is_resident:
            residency.reservation.release()
            residency.reservation = None
            del self._in_host[session.key]

    def detach(self, session: SessionState, count: int) -> Reservation | None:
        """Detach the session's reservation, enlarged to `count` bytes if smaller, for a cache load;
        None if there is no room, with nothing changed."""
        residency = session.residency
        assert residency.reservation is not None
        try:
            self.reserve(session, max(residency.reservation.bytes, count))
        except BudgetError:
            return None
        room, residency.reservation = residency.reservation, None
        del self._in_host[session.key]
        return room

    def return_reservation(self, session: SessionState, room: Reservation) -> None:
        """Undo `detach`."""
        session.residency.reservation = room
        self._in_host[session.key] = session

    def offload(self, session: SessionState) -> bool:
        """Move the active cache to host memory; False if there is no room."""
        residency = session.residency
        assert residency.caches is not None
        if not self._room(session, residency.device_bytes):
            return False
        self.reserve(session, residency.nbytes)
        residency.caches.offload_active()
        self.reserve(session, residency.nbytes)
        return True


class TranscriptMemory:
    """Host memory of the transcripts of all sessions in memory. For the model's thread.

    Args:
        unload: removes a session from memory, if possible.
    """

    def __init__(self, ledger: ByteLedger, unload: Callable[[SessionState], bool]) -> None:
        self._ledger, self._unload = ledger, unload
        self._charged: dict[int, SessionState] = {}
        self._pinned_bytes: dict[int, int] = {}
        self._tenant_bytes: Counter[str] = Counter()

    def missing(self, session: SessionState) -> int:
        """Bytes of a transcript beyond its reservation."""
        return session.transcript.nbytes - (
            0 if session.transcript.reservation is None else session.transcript.reservation.bytes
        )

    def exceeds_share(self, session: SessionState) -> bool:
        """True if the tenant's transcripts that only memory has would exceed the memory left to
        others."""
        if not self._is_above_share(session):
            return False
        for each in self._charged.values():
            if each.durability.epoch:  # written since the charge
                self._count(each, 0)
        return self._is_above_share(session)

    def charge(self, session: SessionState) -> None:
        """Charge the present size of a transcript.

        Raises:
            BudgetError: there is no room.
        """
        size, reservation = session.transcript.nbytes, session.transcript.reservation
        extra = self._ledger.reserve(Tier.HOST, session.tenant, max(0, self.missing(session)))
        if reservation is None:
            session.transcript.reservation = extra
        else:
            reservation.bytes += extra.bytes
            reservation.shrink(size)
        self._charged[session.key] = session
        self._count(session, self._unstored_bytes(session))

    def forget(self, session: SessionState) -> None:
        """Release the reservation of a session that leaves memory."""
        self._charged.pop(session.key, None)
        self._count(session, 0)
        if session.transcript.reservation is not None:
            session.transcript.reservation.release()
            session.transcript.reservation = None

    def unload_idle(self) -> None:
        """Unload sessions without a cache in memory, except for the most recently used ones."""
        idle = [each for each in self._idle() if not each.usage.is_pinned]
        for each in idle[: max(0, len(idle) - MAX_IDLE_TRANSCRIPTS)]:
            self._unload(each)

    def unload_one(self, excluded: SessionState, tenant: str | None = None) -> bool:
        """Unload the least recently used idle session, pinned ones last; true
        if one was unloaded.

        Args:
            excluded: session that stays.
            tenant: only one of this tenant; None for any.
        """
        idle = [each for each in self._idle() if tenant in (None, each.tenant)]
        return any(self._unload(each) for each in idle if each is not excluded)

    def _is_above_share(self, session: SessionState) -> bool:
        extra = self._unstored_bytes(session) - self._pinned_bytes.get(session.key, 0)
        tenant_bytes, total = self._tenant_bytes[session.tenant], self._tenant_bytes.total()
        return extra > 0 and tenant_bytes + extra > self._ledger.limit(Tier.HOST) - (total + extra)

    def _unstored_bytes(self, session: SessionState) -> int:
        return 0 if session.durability.epoch else session.transcript.nbytes

    def _count(self, session: SessionState, nbytes: int) -> None:
        self._tenant_bytes[session.tenant] += nbytes - self._pinned_bytes.pop(session.key, 0)
        if nbytes:
            self._pinned_bytes[session.key] = nbytes
        if not self._tenant_bytes[session.tenant]:
            del self._tenant_bytes[session.tenant]

    def _idle(self) -> list[SessionState]:
        """Idle sessions of which only the transcript is in memory, in order of unloading."""
        idle = [each for each in self._charged.values() if each.can_leave_memory]
        idle = [each for each in idle if not each.residency.is_resident]
        return sorted(idle, key=lambda each: (each.usage.is_pinned, each.usage.last_used))


MIN_MOVES, MAX_MOVES = 3, 16  # measurements that an estimate needs, and those that are kept


class HostMoveRates:
    """Measured rates of moves between the device and host memory.

    The quickest of the latest moves counts: the others waited for something else.
    """

    def __init__(self) -> None:
        self._rates = deque[float](maxlen=MAX_MOVES)  # bytes a second
        self._decisions = 0

    @contextmanager
    def measure(self, count: int) -> Iterator[None]:
        """Measure a move of `count` bytes."""
        started = perf_counter()
        yield
        seconds = perf_counter() - started
        if count > 0 and seconds > 0:
            self.note(count, seconds)

    def note(self, count: int, seconds: float) -> None:
        """Record a move."""
        self._rates.append(count / seconds)

    def is_slower(self, count: int, seconds: float) -> bool:
        """True if a move of `count` bytes takes longer than `seconds`, as far as is known."""
        if len(self._rates) < MIN_MOVES or count <= seconds * max(self._rates):
            return False
        self._decisions += 1
        return self._decisions % PROBE_INTERVAL != 0
