"""The bytes of caches on the device: spoken for before they exist, and checked when they do.

A turn is admitted with the most that its cache may come to, so nothing that has begun ever runs out
of room. One thread works on one cache at a time; what it holds twice while storage is laid out
anew is set aside once, for the cache that needs most of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.errors import BudgetError
from larder.store.ledger import NO_TENANT, ByteLedger, Reservation, Tier


@dataclass(frozen=True)
class MemoryDemand:
    """The most that a cache comes to.

    Args:
        bytes: held to the end.
        transient_bytes: held for a moment beside them.
        host: in host memory meanwhile.
    """

    bytes: int = 0
    transient_bytes: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return self.bytes + self.transient_bytes


class DeviceReservations:
    """What each cache on the device may hold. For the model's thread.

    `violations` counts caches that held more than was spoken for them; 0 unless something is
    broken. `peak` is the most that was ever spoken for.
    """

    def __init__(self, ledger: ByteLedger) -> None:
        self._ledger = ledger
        self._held: dict[int, tuple[MemoryDemand, Reservation]] = {}
        self._passing = ledger.reserve(Tier.DEVICE, NO_TENANT, 0)
        self.violations = 0
        self.peak = 0

    def grant(self, key: int, tenant: str, need: MemoryDemand) -> None:
        """Speak for what a cache will need from now on, more or less than before.

        Raises:
            BudgetError: there is no room; nothing has changed.
        """
        before = self._held.get(key)
        held = 0 if before is None else before[0].bytes
        more = self._ledger.reserve(Tier.DEVICE, tenant, max(0, need.bytes - held))
        try:
            self._set_aside(max(need.transient_bytes, self._most_passing(key)))
        except BudgetError:
            more.release()
            raise
        self._join(key, tenant, need, before, more)
        self.peak = max(self.peak, self._ledger.used(Tier.DEVICE))

    def give_back(self, key: int) -> None:
        """A cache has left the device; nothing happens where none was there."""
        before = self._held.pop(key, None)
        if before is not None:
            before[1].release()
            self._set_aside(self._most_passing(key))

    def check(self, key: int, held_bytes: int) -> None:
        """Compare what is held with what was spoken for; more is charged, and counted as wrong."""
        need, reservation = self._held[key]
        limit = need.bytes + self._passing.bytes
        if held_bytes > limit:
            self.violations += 1
            self._ledger.charge(Tier.DEVICE, reservation.tenant, held_bytes - limit)
            reservation.bytes += held_bytes - limit

    def fits(self, tenant: str, need: MemoryDemand) -> bool:
        """Whether it could ever be granted, with nobody else there."""
        ledger = self._ledger
        own = need.bytes <= ledger.tenant_limit(Tier.DEVICE, tenant)
        host = min(ledger.limit(Tier.HOST), ledger.tenant_limit(Tier.HOST, tenant))
        return own and need.total <= ledger.limit(Tier.DEVICE) and need.host <= host

    def missing(self, key: int, tenant: str, need: MemoryDemand) -> int:
        """Bytes that others must give back before it is granted."""
        before = self._held.get(key)
        held = 0 if before is None else before[0].bytes
        beside = max(need.transient_bytes, self._most_passing(key)) - self._passing.bytes
        own = need.bytes - held
        total = self._ledger.limit(Tier.DEVICE) - self._ledger.used(Tier.DEVICE)
        return max(0, own + beside - total, own - self._ledger.room(Tier.DEVICE, tenant))

    def bytes_of(self, key: int) -> int:
        """What is spoken for one cache; 0 where it is not on the device."""
        held = self._held.get(key)
        return 0 if held is None else held[0].bytes

    def _most_passing(self, but: int) -> int:
        return max(
            (need.transient_bytes for key, (need, _) in self._held.items() if key != but), default=0
        )

    def _set_aside(self, count: int) -> None:
        if count > self._passing.bytes:
            more = self._ledger.reserve(Tier.DEVICE, NO_TENANT, count - self._passing.bytes)
            self._passing.bytes += more.bytes
        self._passing.shrink(count)

    def _join(
        self,
        key: int,
        tenant: str,
        need: MemoryDemand,
        before: tuple[MemoryDemand, Reservation] | None,
        more: Reservation,
    ) -> None:
        if before is None:
            self._held[key] = need, more
            return
        reservation = before[1]
        reservation.bytes += more.bytes
        reservation.shrink(need.bytes)
        self._held[key] = need, reservation
