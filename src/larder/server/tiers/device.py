"""Device tier: memory reserved for caches before they are allocated, and checked afterwards.

A turn is admitted with the upper bound of its memory, so no admitted turn runs out of memory. One
thread works on one cache at a time, so memory that is used twice while storage is reallocated is
reserved once, for the cache with the largest demand. Storage that caches of one tenant share is
reserved once too, apart from what each of them holds alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

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


@dataclass
class CacheReservation:
    """Reservation of one cache on the device.

    Args:
        demand: memory of the cache, with what it shares.
        alone: reserved bytes of `demand`, without what it shares.
        storages: bytes of storage that other caches may hold too, by what identifies it.
    """

    demand: MemoryDemand
    alone: Reservation
    storages: Mapping[object, int] = field(default_factory=dict[object, int])


class SharedStorages:
    """Storage on the device, with the caches that hold it and the reservation of what several do.

    `reservations` has those of storage that two caches or more hold.
    """

    def __init__(self) -> None:
        self._holders: defaultdict[object, set[int]] = defaultdict(set)
        self.reservations: dict[object, Reservation] = {}

    def holders(self, storage: object) -> frozenset[int]:
        """Keys of the caches that hold a storage."""
        return frozenset(self._holders.get(storage, ()))

    def bytes_of(self, storages: Mapping[object, int]) -> int:
        """Bytes of those storages that several caches hold."""
        return sum(n for each, n in storages.items() if each in self.reservations)

    def join(self, key: int, storages: Mapping[object, int]) -> set[int]:
        """Add a cache to the holders of storages; the caches that hold one of them."""
        for each in storages:
            self._holders[each].add(key)
        return {other for each in storages for other in self._holders[each]}

    def leave(self, key: int, storages: Mapping[object, int]) -> set[int]:
        """Remove a cache from the holders of storages; the caches that still hold one of them."""
        left = set[int]()
        for each in storages:
            self._holders[each].discard(key)
            left |= self._holders[each]
            if not self._holders[each]:
                del self._holders[each]
        return left


class DeviceReservations:
    """Reservation of each cache on the device. For the model's thread.

    `violations` counts caches that exceeded their reservation; 0 unless there is a bug. `peak` is
    the maximum of the reserved bytes.
    """

    def __init__(self, ledger: ByteLedger) -> None:
        self._ledger = ledger
        self._reserved: dict[int, CacheReservation] = {}
        self._shared = SharedStorages()
        self._transient = ledger.reserve(Tier.DEVICE, NO_TENANT, 0)
        self.violations = 0
        self.peak = 0

    def grant(self, key: int, tenant: str, demand: MemoryDemand) -> None:
        """Set the reservation of a cache, larger or smaller than before.

        Raises:
            BudgetError: there is no room; nothing has changed.
        """
        count = self._growth(key, demand)
        extra = self._ledger.reserve(Tier.DEVICE, tenant, max(0, count))
        try:
            self._reserve_transient(max(demand.transient_bytes, self._most_transient(key)))
        except BudgetError:
            extra.release()
            raise
        held = self._reserved.setdefault(key, CacheReservation(demand, extra))
        if held.alone is not extra:
            held.alone.bytes += extra.bytes
        held.demand = demand
        held.alone.shrink(demand.bytes - self._shared.bytes_of(held.storages))
        self.peak = max(self.peak, self._ledger.used(Tier.DEVICE))

    def share(
        self,
        held: Mapping[int, Mapping[object, int]],
        changes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Set the storages that caches of one tenant hold and others may hold too.

        Their bytes are part of the demands, and are reserved once.

        Args:
            held: bytes by storage, of each cache.
            changes: bytes by which demands grow or, if negative, shrink.
        """
        changed, touched = dict[object, int](), set(held)
        for key, storages in held.items():
            reserved = self._reserved[key]
            touched |= self._shared.leave(key, reserved.storages)
            reserved.demand = replace(
                reserved.demand, bytes=reserved.demand.bytes + changes.get(key, 0)
            )
            changed |= {**reserved.storages, **storages}
            reserved.storages = dict(storages)
        for key, storages in held.items():
            touched |= self._shared.join(key, storages)
        self._settle(touched, changed)

    def sharers(self, key: int) -> frozenset[int]:
        """Keys of the caches that hold some storage of this one, itself included."""
        held = self._reserved.get(key)
        storages = () if held is None else held.storages
        return frozenset((key,)).union(*(self._shared.holders(each) for each in storages))

    def release(self, key: int) -> None:
        """Release the reservation of a cache, if there is one; what others share stays reserved."""
        held = self._reserved.get(key)
        if held is not None:
            self.share({key: {}})
            del self._reserved[key]
            held.alone.release()
            self._reserve_transient(self._most_transient(key))

    def check(self, key: int, held_bytes: int) -> None:
        """Compare the bytes in use with the reservation; an excess is charged and counted as a
        violation."""
        held = self._reserved[key]
        limit = held.demand.bytes + self._transient.bytes
        if held_bytes > limit:
            self.violations += 1
            self._ledger.charge(Tier.DEVICE, held.alone.tenant, held_bytes - limit)
            held.alone.bytes += held_bytes - limit

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
        transient = max(demand.transient_bytes, self._most_transient(key)) - self._transient.bytes
        device_bytes = self._growth(key, demand)
        total = self._ledger.limit(Tier.DEVICE) - self._ledger.used(Tier.DEVICE)
        return max(
            0,
            device_bytes + transient - total,
            device_bytes - self._ledger.free_bytes(Tier.DEVICE, tenant),
        )

    @property
    def transient_bytes(self) -> int:
        """Bytes that are reserved for a moment of one of the caches."""
        return self._transient.bytes

    def bytes_of(self, key: int) -> int:
        """Reserved bytes of what a cache holds alone; 0 if it is not on the device."""
        held = self._reserved.get(key)
        return 0 if held is None else held.alone.bytes

    def _growth(self, key: int, demand: MemoryDemand) -> int:
        """Bytes that a demand reserves in addition; negative if fewer."""
        held = self._reserved.get(key)
        if held is None:
            return demand.bytes
        return demand.bytes - held.demand.bytes

    def _settle(self, keys: Iterable[int], storages: Mapping[object, int]) -> None:
        """Move reserved bytes between caches of one tenant and the storages that they share."""
        caches, shared = [self._reserved[key] for key in keys], self._shared.reservations
        tenant = next(each.alone.tenant for each in caches)
        targets = list[tuple[Reservation, int]]()
        for each, count in storages.items():
            if len(self._shared.holders(each)) > 1:
                if each not in shared:
                    shared[each] = self._ledger.reserve(Tier.DEVICE, tenant, 0)
                targets.append((shared[each], count))
            elif each in shared:
                targets.append((shared.pop(each), 0))
        targets += [
            (each.alone, each.demand.bytes - self._shared.bytes_of(each.storages))
            for each in caches
        ]
        self._ledger.move(targets)

    def _most_transient(self, excluded: int) -> int:
        return max(
            (
                held.demand.transient_bytes
                for key, held in self._reserved.items()
                if key != excluded
            ),
            default=0,
        )

    def _reserve_transient(self, count: int) -> None:
        if count > self._transient.bytes:
            extra = self._ledger.reserve(Tier.DEVICE, NO_TENANT, count - self._transient.bytes)
            self._transient.bytes += extra.bytes
        self._transient.shrink(count)
