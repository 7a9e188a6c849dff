"""Device memory: reservations for caches, made before they are allocated and checked afterwards.

A turn is admitted with the upper bound of its memory, so no admitted turn runs out of memory. One
thread works on one cache at a time, so memory that is used twice while storage is reallocated is
reserved once, for the cache with the largest demand.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.errors import BudgetError
from larder.store.ledger import NO_TENANT, ByteLedger, Reservation, Tier


@dataclass(frozen=True)
class MemoryDemand:
    """Upper bound of the memory that a cache takes.

    Args:
        bytes: on the device, until the end of the turn.
        transient_bytes: on the device in addition, for a moment.
        host: in host memory.
    """

    bytes: int = 0
    transient_bytes: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return self.bytes + self.transient_bytes


class DeviceReservations:
    """Reservation of each cache on the device. For the model's thread.

    `violations` counts caches that exceeded their reservation; 0 unless there is a bug. `peak` is
    the maximum of the reserved bytes.
    """

    def __init__(self, ledger: ByteLedger) -> None:
        self._ledger = ledger
        self._reserved: dict[int, tuple[MemoryDemand, Reservation]] = {}
        self._transient = ledger.reserve(Tier.DEVICE, NO_TENANT, 0)
        self.violations = 0
        self.peak = 0

    def grant(self, key: int, tenant: str, need: MemoryDemand) -> None:
        """Set the reservation of a cache, larger or smaller than before.

        Raises:
            BudgetError: there is no room; nothing has changed.
        """
        before = self._reserved.get(key)
        held = 0 if before is None else before[0].bytes
        more = self._ledger.reserve(Tier.DEVICE, tenant, max(0, need.bytes - held))
        try:
            self._reserve_transient(max(need.transient_bytes, self._most_transient(key)))
        except BudgetError:
            more.release()
            raise
        self._join(key, tenant, need, before, more)
        self.peak = max(self.peak, self._ledger.used(Tier.DEVICE))

    def release(self, key: int) -> None:
        """Release the reservation of a cache, if there is one."""
        before = self._reserved.pop(key, None)
        if before is not None:
            before[1].release()
            self._reserve_transient(self._most_transient(key))

    def check(self, key: int, held_bytes: int) -> None:
        """Compare the bytes in use with the reservation; an excess is charged and counted as a
        violation."""
        need, reservation = self._reserved[key]
        limit = need.bytes + self._transient.bytes
        if held_bytes > limit:
            self.violations += 1
            self._ledger.charge(Tier.DEVICE, reservation.tenant, held_bytes - limit)
            reservation.bytes += held_bytes - limit

    def fits(self, tenant: str, need: MemoryDemand) -> bool:
        """True if the demand could be granted on an otherwise empty device."""
        ledger = self._ledger
        own = need.bytes <= ledger.tenant_limit(Tier.DEVICE, tenant)
        host = min(ledger.limit(Tier.HOST), ledger.tenant_limit(Tier.HOST, tenant))
        return own and need.total <= ledger.limit(Tier.DEVICE) and need.host <= host

    def missing_bytes(self, key: int, tenant: str, need: MemoryDemand) -> int:
        """Bytes that other caches must release before the demand can be granted."""
        before = self._reserved.get(key)
        held = 0 if before is None else before[0].bytes
        beside = max(need.transient_bytes, self._most_transient(key)) - self._transient.bytes
        own = need.bytes - held
        total = self._ledger.limit(Tier.DEVICE) - self._ledger.used(Tier.DEVICE)
        return max(0, own + beside - total, own - self._ledger.room(Tier.DEVICE, tenant))

    def bytes_of(self, key: int) -> int:
        """Reserved bytes of a cache; 0 if it is not on the device."""
        held = self._reserved.get(key)
        return 0 if held is None else held[0].bytes

    def _most_transient(self, but: int) -> int:
        return max(
            (need.transient_bytes for key, (need, _) in self._reserved.items() if key != but),
            default=0,
        )

    def _reserve_transient(self, count: int) -> None:
        if count > self._transient.bytes:
            more = self._ledger.reserve(Tier.DEVICE, NO_TENANT, count - self._transient.bytes)
            self._transient.bytes += more.bytes
        self._transient.shrink(count)

    def _join(
        self,
        key: int,
        tenant: str,
        need: MemoryDemand,
        before: tuple[MemoryDemand, Reservation] | None,
        more: Reservation,
    ) -> None:
        if before is None:
            self._reserved[key] = need, more
            return
        reservation = before[1]
        reservation.bytes += more.bytes
        reservation.shrink(need.bytes)
        self._reserved[key] = need, reservation
