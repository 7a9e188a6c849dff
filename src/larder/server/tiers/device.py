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

    def grant(self, key: int, tenant: str, demand: MemoryDemand) -> None:
        """Set the reservation of a cache, larger or smaller than before.

        Raises:
            BudgetError: there is no room; nothing has changed.
        """
        before = self._reserved.get(key)
        reserved = 0 if before is None else before[0].bytes
        extra = self._ledger.reserve(Tier.DEVICE, tenant, max(0, demand.bytes - reserved))
        try:
            self._reserve_transient(max(demand.transient_bytes, self._most_transient(key)))
        except BudgetError:
            extra.release()
            raise
        self._join(key, tenant, demand, before, extra)
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
        demand, reservation = self._reserved[key]
        limit = demand.bytes + self._transient.bytes
        if held_bytes > limit:
            self.violations += 1
            self._ledger.charge(Tier.DEVICE, reservation.tenant, held_bytes - limit)
            reservation.bytes += held_bytes - limit

    def exceeded_limit(self, tenant: str, demand: MemoryDemand) -> str:
        """Limit that the demand exceeds even on an otherwise empty device; empty for none."""
        ledger = self._ledger
        limits = (
            ("--tenant-quota device", demand.bytes, ledger.tenant_limit(Tier.DEVICE, tenant)),
            ("--kv-budget", demand.total, ledger.limit(Tier.DEVICE)),
            ("--tenant-quota host", demand.host, ledger.tenant_limit(Tier.HOST, tenant)),
            ("--host-budget", demand.host, ledger.limit(Tier.HOST)),
        )
        return next(
            (
                f"{count:,} bytes, more than the {limit:,} of {option}"
                for option, count, limit in limits
                if count > limit
            ),
            "",
        )

    def missing_bytes(self, key: int, tenant: str, demand: MemoryDemand) -> int:
        """Bytes that other caches must release before the demand can be granted."""
        before = self._reserved.get(key)
        reserved = 0 if before is None else before[0].bytes
        transient = max(demand.transient_bytes, self._most_transient(key)) - self._transient.bytes
        device_bytes = demand.bytes - reserved
        total = self._ledger.limit(Tier.DEVICE) - self._ledger.used(Tier.DEVICE)
        return max(
            0,
            device_bytes + transient - total,
            device_bytes - self._ledger.room(Tier.DEVICE, tenant),
        )

    def bytes_of(self, key: int) -> int:
        """Reserved bytes of a cache; 0 if it is not on the device."""
        reserved = self._reserved.get(key)
        return 0 if reserved is None else reserved[0].bytes

    def _most_transient(self, excluded: int) -> int:
        return max(
            (
                demand.transient_bytes
                for key, (demand, _) in self._reserved.items()
                if key != excluded
            ),
            default=0,
        )

    def _reserve_transient(self, count: int) -> None:
        if count > self._transient.bytes:
            extra = self._ledger.reserve(Tier.DEVICE, NO_TENANT, count - self._transient.bytes)
            self._transient.bytes += extra.bytes
        self._transient.shrink(count)

    def _join(
        self,
        key: int,
        tenant: str,
        demand: MemoryDemand,
        before: tuple[MemoryDemand, Reservation] | None,
        extra: Reservation,
    ) -> None:
        if before is None:
            self._reserved[key] = demand, extra
            return
        reservation = before[1]
        reservation.bytes += extra.bytes
        reservation.shrink(demand.bytes)
        self._reserved[key] = demand, reservation
