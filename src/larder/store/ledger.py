"""Byte ledger: used and reserved bytes of each tier, under budgets and the quotas of tenants.

Bytes are reserved before anything is allocated or written, so that used and reserved bytes together
never exceed a budget.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from larder.core.errors import BadParameter, BudgetError, TenantBudgetError

UNLIMITED = 2**62
NO_TENANT = ""  # to which the index is charged, and data of unknown tenants


class Tier(Enum):
    """Memory or storage tier.

    DEVICE: memory of the model's device. HOST: memory of this machine. DISK: the store.
    """

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class ByteBudgets:
    """Byte budgets of tiers and tenants.

    Args:
        total: by tier; a tier that is not named has no limit.
        tenant: by tier, of each tenant.
    """

    total: Mapping[Tier, int] = field(default_factory=lambda: MappingProxyType({}))
    tenant: Mapping[Tier, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for limits in (self.total, self.tenant):
            for tier, count in limits.items():
                if count < 0:
                    raise BadParameter(
                        f"The budget of the {tier.value} tier must be 0 bytes or more, got {count}."
                    )

    def divided(self, parts: int) -> ByteBudgets:
        """Equal shares of the budgets, those of tenants included."""
        total = {tier: count // parts for tier, count in self.total.items()}
        tenant = {tier: count // parts for tier, count in self.tenant.items()}
        return ByteBudgets(total=total, tenant=tenant)


class Reservation:
    """Reserved bytes, released at the end of a `with` block.

    Safe from threads; releasing twice does nothing.
    """

    def __init__(self, ledger: ByteLedger, tier: Tier, tenant: str, count: int) -> None:
        self.tier, self.tenant, self.bytes = tier, tenant, count
        self._ledger = ledger

    def release(self) -> None:
        """Release the reservation."""
        self.shrink(0)

    def shrink(self, count: int) -> None:
        """Reduce the reservation; no effect if `count` is larger."""
        with self._ledger.lock:
            released, self.bytes = max(self.bytes - count, 0), min(self.bytes, count)
            self._ledger.release(self.tier, self.tenant, released)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class ByteLedger:
    """Accounts of all tiers. Safe from threads; each process has its own."""

    def __init__(self, budgets: ByteBudgets = ByteBudgets()) -> None:  # noqa: B008, frozen
        self.lock = threading.RLock()
        self._total = dict(budgets.total)
        self._tenant = dict(budgets.tenant)
        self._used: dict[Tier, int] = defaultdict(int)
        self._of: dict[tuple[Tier, str], int] = defaultdict(int)
        self._reserved: dict[tuple[Tier, str], int] = defaultdict(int)  # as part of `_of`
        self._groups: dict[str, frozenset[str]] = {}
        self._freed = threading.Condition(self.lock)

    def group(self, tenants: Collection[str]) -> None:
        """Count the bytes of several tenants as those of one, under one budget."""
        members = frozenset(tenants)
        with self._freed:
            self._groups.update(dict.fromkeys(members, members))
            self._freed.notify_all()

    def group_of(self, tenant: str) -> frozenset[str]:
        """Tenants that share the budget of a tenant, itself included."""
        with self.lock:
            return self._groups.get(tenant, frozenset((tenant,)))

    def reserve(
        self, tier: Tier, tenant: str, count: int, wait_seconds: float = 0.0
    ) -> Reservation:
        """Reserve bytes before they are allocated or written.

        Args:
            wait_seconds: how long to wait for others to release bytes.

        Raises:
            BudgetError: there is no room; nothing has changed.
        """
        if count < 0:
            raise BadParameter(f"{count} bytes were to be reserved: take 0 or more.")
        with self._freed:
            is_hopeless = count > min(self.limit(tier), self.tenant_limit(tier, tenant))
            if is_hopeless or not self._freed.wait_for(
                lambda: not count or self.free_bytes(tier, tenant) >= count, wait_seconds
            ):
                raise self._refusal(tier, tenant, count)
            self._add(tier, tenant, count)
            self._reserved[tier, tenant] += count
        return Reservation(self, tier, tenant, count)

    def charge(self, tier: Tier, tenant: str, count: int) -> None:
        """Charge bytes that already exist (negative: discharge), whether or not they were
        reserved.
        """
        with self._freed:
            self._add(tier, tenant, max(count, -self._of[tier, tenant]))
            self._freed.notify_all()

    def set(self, tier: Tier, counts: Mapping[str, int]) -> None:
        """Set used bytes by tenant; they may exceed the budget. Reservations count in addition."""
        with self._freed:
            for _, tenant in [key for key in self._of if key[0] is tier]:
                self._add(tier, tenant, -self._of[tier, tenant])
            reserved = {key[1]: count for key, count in self._reserved.items() if key[0] is tier}
            for added in (counts, reserved):
                for tenant, count in added.items():
                    self._add(tier, tenant, count)
            self._freed.notify_all()

    def release(self, tier: Tier, tenant: str, count: int) -> None:
        """Release reserved bytes; for `Reservation`, which knows how many are left."""
        with self._freed:
            self._reserved[tier, tenant] -= count
            if not self._reserved[tier, tenant]:
                del self._reserved[tier, tenant]
            self._add(tier, tenant, -min(count, self._of[tier, tenant]))
            self._freed.notify_all()

    def move(self, targets: Sequence[tuple[Reservation, int]]) -> None:
        """Set reservations of one tier and tenant to new sizes, at once.

        What some give up others take, so that the sum exceeds no budget unless it grows.
        """
        with self._freed:
            for reservation, count in targets:
                change, reservation.bytes = count - reservation.bytes, count
                tier, tenant = reservation.tier, reservation.tenant
                self._reserved[tier, tenant] += change
                self._add(tier, tenant, change)
            self._freed.notify_all()

    def lower(self, tier: Tier, count: int) -> int:
        """Lower a tier's budget; return the bytes that the caller must now evict.

        Until they are evicted nothing can be reserved.
        """
        if count < 0:
            raise BadParameter(
                f"The budget of the {tier.value} tier must be 0 bytes or more, got {count}."
            )
        with self._freed:
            self._total[tier] = count
            self._freed.notify_all()
            return max(self._used[tier] - count, 0)

    def limit(self, tier: Tier) -> int:
        """Byte budget of a tier."""
        return self._total.get(tier, UNLIMITED)

    def tenant_limit(self, tier: Tier, tenant: str) -> int:
        """Byte budget of a tenant in a tier; `NO_TENANT` is bounded by the total alone."""
        return UNLIMITED if tenant == NO_TENANT else self._tenant.get(tier, UNLIMITED)

    def used(self, tier: Tier, tenant: str | None = None) -> int:
        """Used and reserved bytes, of one tenant or all."""
        with self.lock:
            return self._used[tier] if tenant is None else self._of[tier, tenant]

    def free_bytes(self, tier: Tier, tenant: str) -> int:
        """Bytes that a tenant can reserve now; negative after a budget was lowered."""
        with self.lock:
            total = self.limit(tier) - self._used[tier]
            return min(total, self.tenant_limit(tier, tenant) - self._held(tier, tenant))

    def _held(self, tier: Tier, tenant: str) -> int:
        """Bytes of a tenant and of those that share its budget."""
        return sum(self._of.get((tier, each), 0) for each in self.group_of(tenant))

    def _add(self, tier: Tier, tenant: str, count: int) -> None:
        self._used[tier] += count
        self._of[tier, tenant] += count
        if not self._of[tier, tenant]:
            del self._of[tier, tenant]

    def _refusal(self, tier: Tier, tenant: str, count: int) -> BudgetError:
        of_all = self.limit(tier) - self._used[tier] < count
        whose, limit = (
            ("all tenants together", self.limit(tier))
            if of_all
            else ("this tenant", self.tenant_limit(tier, tenant))
        )
        held = self._used[tier] if of_all else self._held(tier, tenant)
        is_own_full = self.tenant_limit(tier, tenant) - self._held(tier, tenant) < count
        kind = TenantBudgetError if is_own_full else BudgetError
        return kind(
            f"{count} bytes more do not fit in the {tier.value} tier, where {whose} may hold "
            f"{limit} and hold {held}: remove sessions, save in fewer bits, or raise the budget.",
            tier.value,
        )
