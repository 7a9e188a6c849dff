"""Where caches rest: on the device, in host memory, in the store, or nowhere, so that their text is
read again.

What was used least recently leaves first, or whoever another rule of eviction names. Everything is
reserved before it is there; what does not fit anywhere is dropped, never kept anyway. Whoever needs
the room of a cache that is on its way to the store waits for it: a slow disk holds requests up, and
never has more be held than may.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from larder.core.errors import LarderError
from larder.server.model_thread import CompletionQueue
from larder.server.persistence.base import Durability
from larder.server.session_state import TOKEN_TYPECODE, SavedCache, SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.server.tiers.disk import (
    WRITE_COPIES,
    DiskTier,
    DiskTierWriter,
    LoadedCaches,
    install_caches,
    write_memory_bytes,
)
from larder.server.tiers.host import ChatHostMemory, TranscriptMemory, idle_bytes
from larder.session.caches import offload
from larder.store.eviction.base import Candidate, CandidateColumns, EvictionPolicy
from larder.store.ledger import NO_TENANT, ByteLedger, Reservation, Tier


class TierManager:
    """Moves the caches of sessions. For the model's thread.

    `parked` and `restored` count moves by tier; `dropped` are caches that were given up.

    Args:
        rule: who leaves first.
        clock: seconds since 1970.
        vault: keeps what has no room in memory.
        unload: has a session of which nothing need be in memory leave it, if that can be.
    """

    def __init__(
        self,
        ledger: ByteLedger,
        purse: DeviceReservations,
        rule: EvictionPolicy,
        clock: Callable[[], float],
        vault: DiskTier,
        news: CompletionQueue,
        unload: Callable[[SessionState], bool],
    ) -> None:
        self._ledger, self._purse, self._unload = ledger, purse, unload
        self._order, self.vault = SessionEvictionOrder(rule, clock, purse, vault), vault
        self._stowing = DiskTierWriter(ledger, vault, news, self.write_next)
        self.on_device: dict[int, SessionState] = {}
        self.in_host: dict[int, SessionState] = {}
        self.chats = ChatHostMemory(ledger, purse, self.in_host, self._host_room, self.drop)
        self.logs = TranscriptMemory(ledger, unload)
        self.parked: Counter[str] = Counter()
        self.restored: Counter[str] = Counter()
        self.dropped = 0

    @property
    def is_leaving(self) -> bool:
        """Whether a cache is on its way out of memory, so that there will be room."""
        return self._stowing.is_busy

    def grant(self, sitting: SessionState, need: MemoryDemand) -> None:
        """Speak for device memory, for which sessions that nobody waits for may have to leave.

        Raises:
            BudgetError: those that are left are all in use, or are being written; what has left
                stays where it is now.
        """
        missing = self._purse.missing(sitting.key, sitting.tenant, need)
        while missing and self._leave_device(sitting, need, missing):
            missing = self._purse.missing(sitting.key, sitting.tenant, need)
        self._purse.grant(sitting.key, sitting.tenant, need)
        self.on_device[sitting.key] = sitting
        sitting.clock = self._order.clock(Tier.DEVICE)

    def settle(self, sitting: SessionState) -> None:
        """A turn is over: give slack back, and keep no more than what is there."""
        self.chats.settle(sitting)

    def host_room(self, sitting: SessionState, count: int) -> Reservation | None:
        """Host memory for a while; None where there is none."""
        if not self._host_room(sitting, count):
            return None
        return self._ledger.reserve(Tier.HOST, sitting.tenant, count)

    def take(
        self,
        sitting: SessionState,
        source: SessionState,
        kept: SavedCache,
        fetched: LoadedCaches,
        room: Reservation,
    ) -> None:
        """Bring caches from the store, the one that answered last to the device, which was granted
        before.

        Args:
            source: whose they were.
            room: host memory in which they have arrived.

        Raises:
            LarderError: they are not those of a chat; the room is still the caller's.
        """
        try:
            install_caches(sitting, source, kept, fetched, room)
        except LarderError as error:
            self.vault.reject(error)
            raise
        self.in_host[sitting.key] = sitting
        self.restore_from_host(sitting)
        self.restored[Tier.HOST.value] -= 1  # it has only passed there
        self.restored[Tier.DISK.value] += 1
        sitting.note()

    def restore_from_host(self, sitting: SessionState) -> None:
        """Bring a parked cache back to the device, which was granted before."""
        if sitting.chat_cache is not None:
            sitting.chat_cache.caches.activate(sitting.episode)
            self.restored[Tier.HOST.value] += 1
            return
        assert sitting.parked is not None
        parked, sitting.parked = sitting.parked, None
        spec = sitting.rule.desk.decoder.spec
        try:
            sitting.cache = parked.copied(spec) if sitting.is_saving else parked.restore(spec)
        finally:
            self._give_host_back(sitting)
        self.restored[Tier.HOST.value] += 1

    def park(self, sitting: SessionState) -> bool:
        """Move a cache from the device to host memory; False if there is no room, and it stays."""
        if sitting.chat_cache is not None:
            soon = self._stowing.soon(write_memory_bytes(sitting))
            self._free_written_host(sitting, sitting.device_bytes + soon)
            return self._parked(sitting, self.chats.park(sitting))
        cache = sitting.cache
        assert cache is not None
        count = idle_bytes(sitting)
        self._free_written_host(sitting, count + self._stowing.soon(WRITE_COPIES * count))
        room = self.host_room(sitting, count)
        if room is None:
            return False
        sitting.parked, sitting.cache = offload(cache), None
        room.shrink(sitting.parked.nbytes)
        sitting.host = room
        self.in_host[sitting.key] = sitting
        return self._parked(sitting, True)

    def _parked(self, sitting: SessionState, is_done: bool) -> bool:
        if is_done:
            self._leave(sitting)
            sitting.clock = self._order.clock(Tier.HOST)
            self.parked[Tier.HOST.value] += 1
            self.write_next()
        return is_done

    def write_next(self) -> None:
        """Have the cache that would leave host memory first be written, if none is just now."""
        self.parked[Tier.DISK.value] = self._stowing.saved
        wanting = [each for each in self.in_host.values() if self._stowing.wants(each)]
        if wanting and not self._stowing.is_busy:
            first = self._order.first(Tier.HOST, wanting, None, 1)[0]
            self._free_written_host(first, write_memory_bytes(first))
            self._stowing.start(first)

    def save_at_once(self, sitting: SessionState) -> Future[SavedCache] | None:
        """Have the cache of a turn that was just kept be written, where its end waits for that."""
        if self.vault.durability is not Durability.SNAPSHOT:
            return None
        return self.save(sitting)

    def save(self, sitting: SessionState) -> Future[SavedCache] | None:
        """Have a cache be written, if it can be and need be."""
        if sitting.is_saving:
            return self._stowing.under_way(sitting)
        if not sitting.has_resident_cache or not self._stowing.needs(sitting):
            return None
        self._host_room(sitting, write_memory_bytes(sitting))
        return self._stowing.start(sitting)

    def drop(self, sitting: SessionState) -> None:
        """Give a cache up, wherever it is in memory: the store may have it, or its text is read
        again."""
        if sitting.has_resident_cache and not sitting.is_saved:
            self.dropped += 1
        sitting.cache = sitting.parked = sitting.chat_cache = None
        sitting.read, sitting.settled_tokens, sitting.is_coded = array(TOKEN_TYPECODE), 0, False
        sitting.is_lossless = sitting.kept is None or sitting.kept.is_lossless
        self._give_host_back(sitting)
        self._leave(sitting)

    def weigh(self, sitting: SessionState) -> bool:
        """Charge what a session's log takes now; False if it leaves others no room, or has none."""
        logs = self.logs
        if logs.exceeds_share(sitting) or not self._log_room(sitting, logs.missing(sitting)):
            return False
        self.logs.charge(sitting)
        return True

    def forget(self, sitting: SessionState) -> None:
        """A session is no more, here: everything of it goes."""
        self.drop(sitting)
        self.logs.forget(sitting)

    def lower(self, tier: Tier, count: int) -> int:
        """Set a tier's budget, and have sessions leave until it holds; bytes still above it."""
        above = self._ledger.lower(tier, count)
        held = self.on_device if tier is Tier.DEVICE else self.in_host
        while above > 0 and (leaving := self._order.first(tier, held.values(), None, above)):
            for sitting in leaving:
                if tier is Tier.HOST or not self.park(sitting):
                    self.drop(sitting)
            above = self._ledger.used(tier) - count
        return max(0, above)

    def _leave_device(self, sitting: SessionState, need: MemoryDemand, missing: int) -> bool:
        """Have idle sessions leave the device; whether any did.

        Where all tenants together have room, only the tenant's own need leave.
        """
        is_own = not self._purse.missing(sitting.key, NO_TENANT, need)
        whose = sitting.tenant if is_own else None
        wanted = self.on_device.values(), sitting, missing, whose
        left = [self._left(each) for each in self._order.first(Tier.DEVICE, *wanted)]
        return any(left)

    def _left(self, sitting: SessionState) -> bool:
        """Have a session leave the device; False where that must wait for the store."""
        if self.park(sitting):
            return True
        may_fit = 0 < idle_bytes(sitting) <= self._host_limit(sitting.tenant)
        if may_fit and self.is_leaving and not sitting.is_saved:
            return False
        self.evict(sitting)
        return True

    def evict(self, sitting: SessionState) -> None:
        """Have a cache leave memory, and all else of its session, if the store has it."""
        self.drop(sitting)
        if sitting.can_leave_memory and sitting.kept is not None and not sitting.is_pinned:
            self._unload(sitting)

    def _host_room(self, sitting: SessionState, count: int) -> bool:
        """Make room in host memory; False while it has to wait for the store, or all are in use."""
        if count > self._host_limit(sitting.tenant):
            return False
        while not self._free_written_host(sitting, count):
            self.write_next()
            missing = self._missing_host(sitting, count)
            if self.is_leaving or not self._evict_from_host(
                sitting, self.in_host.values(), count, missing
            ):
                return False
        return True

    def _free_written_host(self, sitting: SessionState, count: int) -> bool:
        """The same by having caches leave that the store has, or will never have, and logs."""
        while (missing := self._missing_host(sitting, count)) > 0:
            idle = [each for each in self.in_host.values() if not self._stowing.needs(each)]
            if not self._evict_from_host(
                sitting, idle, count, missing
            ) and not self.logs.unload_one(sitting):
                return False
        return True

    def _log_room(self, sitting: SessionState, count: int) -> bool:
        """The same for what cannot wait."""
        if count > self._host_limit(sitting.tenant):
            return False
        while count > 0 and (missing := self._missing_host(sitting, count)) > 0:
            if self._host_room(sitting, count):
                return True
            if not self._evict_from_host(sitting, self.in_host.values(), count, missing):
                return False
        return True

    def _evict_from_host(
        self, sitting: SessionState, held: Iterable[SessionState], count: int, missing: int
    ) -> bool:
        """Have some leave for so many bytes; whether any did."""
        is_own = self._ledger.limit(Tier.HOST) - self._ledger.used(Tier.HOST) >= count
        whose = sitting.tenant if is_own else None
        leaving = self._order.first(Tier.HOST, held, sitting, missing, whose)
        for each in leaving:
            self.evict(each)
        return bool(leaving)

    def _missing_host(self, sitting: SessionState, count: int) -> int:
        return count - self._ledger.room(Tier.HOST, sitting.tenant)

    def _host_limit(self, tenant: str) -> int:
        ledger = self._ledger
        return min(ledger.limit(Tier.HOST), ledger.tenant_limit(Tier.HOST, tenant))

    def _leave(self, sitting: SessionState) -> None:
        self._purse.give_back(sitting.key)
        self.on_device.pop(sitting.key, None)

    def _give_host_back(self, sitting: SessionState) -> None:
        self.in_host.pop(sitting.key, None)
        if sitting.host is not None:
            self._stowing.hold(sitting, sitting.host)
            sitting.host = None


FOREVER = float("inf")


class SessionEvictionOrder:
    """Tells a rule of eviction what is known of sessions. For the model's thread.

    Args:
        clock: seconds since 1970.
        vault: knows how long reading takes.
    """

    def __init__(
        self,
        rule: EvictionPolicy,
        clock: Callable[[], float],
        purse: DeviceReservations,
        vault: DiskTier,
    ) -> None:
        self._rule, self._now, self._purse, self._vault = rule, clock, purse, vault
        self._clocks: dict[Tier, float] = {}

    def clock(self, tier: Tier) -> float:
        """Of a rule that ages what is not used; who is used now gets it."""
        return self._clocks.get(tier, 0.0)

    def first(
        self,
        tier: Tier,
        held: Iterable[SessionState],
        but: SessionState | None,
        missing: int,
        tenant: str | None = None,
    ) -> list[SessionState]:
        """Who leaves for so many bytes; nobody who is running, or is being written."""
        idle = [each for each in held if not (each.is_running or each.is_saving)]
        idle = [each for each in idle if each is not but]
        idle = [each for each in idle if tenant in (None, each.tenant)]
        told = CandidateColumns.of([self._candidate(each) for each in idle])
        leaving = self._rule.select_victims(told, self._now(), missing)
        self._clocks[tier] = max(self.clock(tier), leaving.clock)
        return [idle[row] for row in leaving.rows]

    def _candidate(self, sitting: SessionState) -> Candidate:
        parked = sitting.host_bytes if sitting.has_resident_cache else 0
        return Candidate(
            name=str(sitting.key),
            bytes=max(1, self._purse.bytes_of(sitting.key) + parked),
            seconds=self._vault.seconds_to_read(len(sitting.read)),
            last_used=sitting.last_used,
            uses=sitting.uses,
            clock=sitting.clock,
            session=str(sitting.key),
            pinned_until=FOREVER if sitting.is_pinned else -FOREVER,
            steps=sitting.steps,
            pauses=tuple(sitting.pauses),
        )


def can_unload(sitting: SessionState, family: Iterable[SessionState]) -> bool:
    """Whether a session may leave memory with all that began as it did: the store has all of them,
    and none that is pinned goes with one that is not."""
    others = [each for each in family if each is not sitting]
    if any(each.has_resident_cache or not each.can_leave_memory for each in others):
        return False
    return sitting.is_pinned or not any(each.is_pinned for each in others)
