"""Tier manager: session caches on the device, in host memory, in the store, or dropped and
recomputed.

The eviction policy chooses what leaves a full tier; the default is least recently used. Everything
is reserved before it is allocated, and what fits nowhere is dropped. A request that needs the
memory of a cache being written to the store waits for the write: a slow disk delays requests, but
the budget is never exceeded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from larder.core.errors import BudgetError, LarderError
from larder.server.model_thread import CompletionQueue
from larder.server.persistence.base import Durability
from larder.server.resident_caches import COPIES
from larder.server.session_state import SavedCache, SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.server.tiers.disk import (
    DiskTier,
    DiskTierWriter,
    LoadedCaches,
    StartedLoad,
    install_caches,
)
from larder.server.tiers.eviction_order import EvictionTuner, SessionEvictionOrder
from larder.server.tiers.host import ChatHostMemory, HostMoveRates, TranscriptMemory
from larder.server.tiers.shared_prefixes import SharedPrefixes
from larder.store.eviction.base import EvictionPolicy
from larder.store.ledger import NO_TENANT, ByteLedger, Reservation, Tier


class TierManager:
    """Moves session caches between tiers. For the model's thread.

    `parked` and `restored` count moves by tier; `dropped` counts dropped caches.

    Args:
        policy: eviction policy.
        clock: seconds since 1970.
        disk: stores caches for which memory has no room.
        unload: removes a session from memory, if possible.
        operations: of reading a text of so many tokens.
    """

    def __init__(
        self,
        ledger: ByteLedger,
        reservations: DeviceReservations,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        disk: DiskTier,
        completions: CompletionQueue,
        unload: Callable[[SessionState], bool],
        operations: Callable[[int], float] = float,
    ) -> None:
        self._ledger, self._reservations, self._unload = ledger, reservations, unload
        self.prefetches = policy.prefetches
        tuner = EvictionTuner(policy, lambda: ledger.limit(Tier.DEVICE))
        cost = operations if policy.counts_operations else disk.seconds_to_read
        self._order, self.disk = SessionEvictionOrder(tuner, clock, reservations, cost), disk
        self._writer = DiskTierWriter(ledger, disk, completions, self.write_next)
        self.on_device: dict[int, SessionState] = {}
        self.in_host: dict[int, SessionState] = {}
        self.shares = SharedPrefixes(self.on_device, reservations)
        self.started: dict[int, StartedLoad] = {}  # loads ahead of requests, by session
        self.chats = ChatHostMemory(ledger, self.in_host, self._free_host)
        self.transcripts = TranscriptMemory(ledger, unload)
        self.rates = HostMoveRates()
        self.parked: Counter[str] = Counter()
        self.restored: Counter[str] = Counter()
        self.dropped = 0
        self._evictable: str | None = None  # tenant whose sessions alone may leave; None for all

    @contextmanager
    def evicting_only(self, tenant: str) -> Iterator[None]:
        """Context in which no session of another tenant leaves memory."""
        self._evictable = tenant
        try:
            yield
        finally:
            self._evictable = None

    def is_writing(self, tenant: str | None = None) -> bool:
        """True if a cache is being written, whose memory will then be free.

        Args:
            tenant: only one of this tenant; None for any.
        """
        return self._writer.is_writing(tenant)

    def grant(self, session: SessionState, demand: MemoryDemand) -> None:
        """Reserve device memory, evicting idle sessions if necessary.

        Raises:
            BudgetError: the remaining sessions are in use or being written; evictions so far are
                not undone.
        """
        missing = self._reservations.missing_bytes(session.key, session.tenant, demand)
        while missing and self._free_device(session, demand, missing):
            missing = self._reservations.missing_bytes(session.key, session.tenant, demand)
        self._reservations.grant(session.key, session.tenant, demand)
        self.on_device[session.key] = session
        session.usage.clock = self._order.clock(Tier.DEVICE)

    def displaces_later(self, session: SessionState, demand: MemoryDemand) -> bool:
        """True if device memory is free, or would be by evicting only sessions that are due in more
        workflow steps."""
        missing = self._reservations.missing_bytes(session.key, session.tenant, demand)
        if not missing:
            return True
        victims = self._device_victims(session, demand, missing)
        due = session.usage.workflow_steps
        return bool(victims) and all(each.usage.workflow_steps > due for each in victims)

    def note_use(self, session: SessionState) -> None:
        """Record a request of a session, for eviction policies that are tuned."""
        self._order.note_use(session)

    def shrink_to_fit(self, session: SessionState) -> None:
        """Release slack after a turn, and reduce the reservations to the bytes in use; a rebuild in
        progress, which holds more, is dropped."""
        residency = session.residency
        if residency.resident_caches is not None:
            residency.resident_caches.stop_rebuild()
        cache, need = residency.active, MemoryDemand()
        if cache is not None:
            cache.compact()
            self.shares.note(session)
            self._reservations.check(session.key, cache.device_nbytes)
            largest = max(store.device_nbytes for store in cache.layers)
            need = MemoryDemand(cache.device_nbytes, largest)
        self._reservations.grant(session.key, session.tenant, need)
        if residency.resident_caches is None or not residency.resident_caches.spans_tiers:
            return
        try:
            self.chats.reserve(session, residency.host_bytes)
        except BudgetError:
            self.drop(session)

    def reserve_host(self, session: SessionState, count: int) -> Reservation | None:
        """Reserve host memory, by eviction if needed; None if too little can be freed now."""
        if not self._free_host(session, count):
            return None
        return self._ledger.reserve(Tier.HOST, session.tenant, count)

    def awaitable_write(
        self, session: SessionState, saved: SavedCache
    ) -> Future[SavedCache] | None:
        """Write in progress whose end may free the host memory of a load, sooner than the text is
        read again; None if there is none.
        """
        if saved.load_bytes > self._host_limit(session.tenant):
            return None
        whose = self._whose_host(session, saved.load_bytes)
        return self._writer.awaitable(whose, self.disk.seconds_to_read(saved.tokens))

    def leave_next_write(self) -> None:
        """Start no write when the one in progress ends: a request takes the memory first, which
        then calls `write_next`."""
        self._writer.leave_next()

    def take_started(
        self, session: SessionState, saved: SavedCache | None
    ) -> Future[LoadedCaches] | None:
        """Load of a session that was started ahead; None if there is none of this cache.

        Its host memory is free again, for the caller to reserve.
        """
        load = self.started.pop(session.key, None)
        if load is None:
            return None
        load.reservation.release()
        return load.future if load.saved is saved else None

    def restore_from_disk(
        self,
        session: SessionState,
        source: SessionState,
        saved: SavedCache,
        loaded: LoadedCaches,
        reservation: Reservation,
    ) -> None:
        """Install loaded caches, and bring the one that answered last to the device, where memory
        is reserved.

        Args:
            source: session that they belonged to.
            reservation: host memory that they are in.

        Raises:
            LarderError: the chat caches do not match the transcript; `reservation` is still the
                caller's.
        """
        try:
            install_caches(session, source, saved, loaded, reservation)
        except LarderError as error:
            self.disk.reject(error)
            raise
        self.in_host[session.key] = session
        self.restore_from_host(session)
        self.restored[Tier.HOST.value] -= 1  # the step through host memory does not count
        self.restored[Tier.DISK.value] += 1
        session.update_occupancy()

    def restore_from_host(self, session: SessionState) -> None:
        """Bring an offloaded cache to the device, where memory is reserved; a rebuild in progress,
        which needs that memory, is dropped."""
        residency = session.residency
        held = residency.resident_caches
        assert held is not None
        held.stop_rebuild()
        try:
            with self.rates.measure(held.moved_bytes):
                held.caches.activate(residency.episode)
        except BaseException:
            if not held.spans_tiers:
                residency.resident_caches = None
            raise
        finally:
            if not held.spans_tiers:
                self._release_host(session)
        self.restored[Tier.HOST.value] += 1

    def offload(self, session: SessionState) -> bool:
        """Move a cache from the device to host memory; False if there is no room, and it stays."""
        residency = session.residency
        held = residency.resident_caches
        assert held is not None
        held.stop_rebuild()
        if held.spans_tiers:
            soon = self._writer.start_bytes(residency.write_bytes)
            self._free_written_host(session, residency.device_bytes + soon)
            return self._parked(session, self.chats.offload(session))
        count = residency.idle_bytes
        self._free_written_host(session, count + self._writer.start_bytes(COPIES * count))
        reservation = self.reserve_host(session, count)
        if reservation is None:
            return False
        with self.rates.measure(count):
            held.caches.offload_active()
        reservation.shrink(residency.nbytes)
        residency.reservation = reservation
        self.in_host[session.key] = session
        return self._parked(session, True)

    def _parked(self, session: SessionState, is_done: bool) -> bool:
        if is_done:
            self._leave(session)
            session.usage.clock = self._order.clock(Tier.HOST)
            self.parked[Tier.HOST.value] += 1
            self.write_next()
        return is_done

    def write_next(self) -> None:
        """Start writing the cache that would leave host memory first, unless a write is in
        progress."""
        self.parked[Tier.DISK.value] = self._writer.saved
        wanting = [each for each in self.in_host.values() if self._writer.may_write(each)]
        if wanting and not self._writer.is_busy:
            first = self._order.first(Tier.HOST, wanting, None, 1)[0]
            self._free_written_host(first, first.residency.write_bytes)
            self._writer.start(first)

    def save_at_once(self, session: SessionState) -> Future[SavedCache] | None:
        """Start writing the cache of a completed turn, if the durability demands it."""
        if self.disk.durability is not Durability.SNAPSHOT:
            return None
        return self.save(session)

    def save(self, session: SessionState) -> Future[SavedCache] | None:
        """Start writing a session's cache, if possible and necessary."""
        if session.residency.is_saving:
            return self._writer.write_in_progress(session)
        if not session.residency.is_resident or not self._writer.can_write(session):
            return None
        self._free_host(session, session.residency.write_bytes)
        return self._writer.start(session)

    def drop(self, session: SessionState) -> None:
        """Drop a session's cache from memory; the store may have it, or it is recomputed."""
        residency = session.residency
        if residency.is_resident and not residency.is_saved:
            self.dropped += 1
        residency.clear()
        self._release_host(session)
        self._leave(session)

    def charge_transcript(self, session: SessionState) -> bool:
        """Charge the transcript's present size; False if it exceeds the tenant's share or there is
        no room."""
        logs = self.transcripts
        if logs.exceeds_share(session) or not self._free_host_for_transcript(
            session, logs.missing(session)
        ):
            return False
        self.transcripts.charge(session)
        return True

    def forget(self, session: SessionState) -> None:
        """Drop everything that memory has of a session."""
        self.take_started(session, None)
        self.drop(session)
        self.transcripts.forget(session)

    def lower(self, tier: Tier, count: int) -> int:
        """Set a tier's budget, and evict sessions until it holds; the bytes still above it."""
        above = self._ledger.lower(tier, count)
        sessions = self.on_device if tier is Tier.DEVICE else self.in_host
        while above > 0 and (victims := self._order.first(tier, sessions.values(), None, above)):
            for session in victims:
                if tier is Tier.HOST or not self.offload(session):
                    self.drop(session)
            above = self._ledger.used(tier) - count
        return max(0, above)

    def _free_device(self, session: SessionState, demand: MemoryDemand, missing: int) -> bool:
        """Evict idle sessions from the device; true if any was evicted."""
        victims = self._device_victims(session, demand, missing)
        if victims:
            self._order.tuner.note_eviction()
        return any([self._evict_from_device(each) for each in victims])

    def _device_victims(
        self, session: SessionState, demand: MemoryDemand, missing: int
    ) -> list[SessionState]:
        """Sessions to evict from the device: only the tenant's own ones, if the tier has room but
        the tenant's limit is reached."""
        is_own = not self._reservations.missing_bytes(session.key, NO_TENANT, demand)
        whose = session.tenant if is_own else self._evictable
        return self._order.first(Tier.DEVICE, self.on_device.values(), session, missing, whose)

    def _evict_from_device(self, session: SessionState) -> bool:
        """Evict a session from the device; False if it has to wait for a write.

        To host memory, unless moving its cache there and back takes longer than reading its text
        again, by measured rates.
        """
        residency = session.residency
        seconds = self.disk.seconds_to_read(len(residency.cached_ids))
        if self.rates.is_slower(2 * residency.idle_bytes, seconds):
            self.evict(session)
            return True
        if self.offload(session):
            return True
        count = session.residency.idle_bytes
        may_fit = 0 < count <= self._host_limit(session.tenant)
        if may_fit and self._awaits_write(session, count) and not session.residency.is_saved:
            return False
        self.evict(session)
        return True

    def evict(self, session: SessionState) -> None:
        """Drop a cache; the session is unloaded, too, if the store has everything."""
        self.drop(session)
        if (
            session.can_leave_memory
            and session.residency.saved_cache is not None
            and not session.usage.is_pinned
        ):
            self._unload(session)

    def _free_host(self, session: SessionState, count: int) -> bool:
        """Free host memory; False while it must wait for a write, or all sessions are in use."""
        if count > self._host_limit(session.tenant):
            return False
        while not self._free_written_host(session, count):
            self.write_next()
            missing = self._missing_host(session, count)
            if self._awaits_write(session, count) or not self._evict_from_host(
                session, self.in_host.values(), count, missing
            ):
                return False
        return True

    def _free_written_host(self, session: SessionState, count: int) -> bool:
        """Free host memory by evicting only caches that the store has or cannot take, and idle
        transcripts."""
        while (missing := self._missing_host(session, count)) > 0:
            idle = [each for each in self.in_host.values() if not self._writer.can_write(each)]
            if not self._evict_from_host(
                session, idle, count, missing
            ) and not self.transcripts.unload_one(session, self._evictable):
                return False
        return True

    def _free_host_for_transcript(self, session: SessionState, count: int) -> bool:
        """Free host memory for a transcript, without waiting for writes."""
        if count > self._host_limit(session.tenant):
            return False
        while count > 0 and (missing := self._missing_host(session, count)) > 0:
            if self._free_host(session, count):
                return True
            if not self._evict_from_host(session, self.in_host.values(), count, missing):
                return False
        return True

    def _evict_from_host(
        self, session: SessionState, sessions: Iterable[SessionState], count: int, missing: int
    ) -> bool:
        """Evict sessions from host memory; true if any was evicted."""
        whose = self._whose_host(session, count)
        victims = self._order.first(Tier.HOST, sessions, session, missing, whose)
        for each in victims:
            self.evict(each)
        return bool(victims)

    def _whose_host(self, session: SessionState, count: int) -> str | None:
        """Tenant whose sessions must leave host memory for some bytes; None for those of any."""
        is_own = self._ledger.limit(Tier.HOST) - self._ledger.used(Tier.HOST) >= count
        return session.tenant if is_own else self._evictable

    def _awaits_write(self, session: SessionState, count: int) -> bool:
        """True if a write in progress will free host memory that a session could have."""
        return self.is_writing(self._whose_host(session, count))

    def _missing_host(self, session: SessionState, count: int) -> int:
        return count - self._ledger.free_bytes(Tier.HOST, session.tenant)

    def _host_limit(self, tenant: str) -> int:
        ledger = self._ledger
        return min(ledger.limit(Tier.HOST), ledger.tenant_limit(Tier.HOST, tenant))

    def _leave(self, session: SessionState) -> None:
        sharers = self._reservations.sharers(session.key) - {session.key}
        self._reservations.release(session.key)
        self.on_device.pop(session.key, None)
        for key in sharers:
            if len(self._reservations.sharers(key)) == 1 and self.on_device[key].is_idle:
                self.shrink_to_fit(self.on_device[key])  # it shares nothing any more

    def _release_host(self, session: SessionState) -> None:
        residency = session.residency
        self.in_host.pop(session.key, None)
        if residency.reservation is not None:
            self._writer.release_after_write(session, residency.reservation)
            residency.reservation = None


def can_unload(session: SessionState, family: Iterable[SessionState]) -> bool:
    """True if a session and all its family may leave memory: the store has them, and no pinned
    session would leave with an unpinned one."""
    others = [each for each in family if each is not session]
    if any(each.residency.is_resident or not each.can_leave_memory for each in others):
        return False
    return session.usage.is_pinned or not any(each.usage.is_pinned for each in others)
