"""Reservations of device memory under random operations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from larder.core import BudgetError
from larder.server import DeviceReservations, MemoryDemand
from larder.store import ByteBudgets, ByteLedger, Tier

LIMIT, OWN = 100, 70
NEEDS = some.builds(MemoryDemand, some.integers(0, 60), some.integers(0, 30))
MOVES = some.lists(
    some.tuples(some.integers(0, 3), some.one_of(NEEDS, some.just(None), some.integers(0, LIMIT))),
    max_size=40,
)


def new_reservations(limit: int = LIMIT) -> tuple[ByteLedger, DeviceReservations]:
    ledger = ByteLedger(ByteBudgets({Tier.DEVICE: limit}, {Tier.DEVICE: OWN}))
    return ledger, DeviceReservations(ledger)


@pytest.mark.failure(number=23)
@given(moves=MOVES)
def test_reservations_never_exceed_the_budget(
    moves: list[tuple[int, MemoryDemand | None | int]],
) -> None:
    ledger, reservations = new_reservations()
    held: dict[int, MemoryDemand] = {}
    for key, move in moves:
        tenant = "ab"[key % 2]
        if isinstance(move, int):  # the budget is lowered: what is held may only shrink
            if ledger.lower(Tier.DEVICE, move):
                ledger.lower(Tier.DEVICE, LIMIT)
        elif move is None:
            reservations.release(key)
            held.pop(key, None)
        else:
            missing = reservations.missing_bytes(key, tenant, move)
            try:
                reservations.grant(key, tenant, move)
            except BudgetError:
                assert missing > 0
            else:
                held[key] = move
                assert not reservations.exceeded_limit(tenant, move) or missing == 0
        passing = max((need.transient_bytes for need in held.values()), default=0)
        spoken = sum(need.bytes for need in held.values()) + passing
        assert ledger.used(Tier.DEVICE) == spoken <= ledger.limit(Tier.DEVICE)
        for owner in "ab":
            own = sum(need.bytes for key, need in held.items() if "ab"[key % 2] == owner)
            assert ledger.used(Tier.DEVICE, owner) == own <= OWN
    for key in list(held):
        reservations.release(key)
    assert ledger.used(Tier.DEVICE) == 0


def test_bytes_beyond_a_reservation_are_counted_and_charged() -> None:
    ledger, reservations = new_reservations()
    reservations.grant(1, "a", MemoryDemand(40, 10))
    reservations.check(1, 50)
    assert reservations.violations == 0
    reservations.check(1, 51)
    assert reservations.violations == 1 and ledger.used(Tier.DEVICE) == 51
    reservations.release(1)
    assert ledger.used(Tier.DEVICE) == 0


def test_demand_beyond_the_limits_is_detected() -> None:
    _, reservations = new_reservations()
    assert not reservations.exceeded_limit("a", MemoryDemand(70, 30))
    own = reservations.exceeded_limit("a", MemoryDemand(71, 0))
    assert own == "71 bytes, more than the 70 of --tenant-quota device"
    total = reservations.exceeded_limit("a", MemoryDemand(70, 31))
    assert total == "101 bytes, more than the 100 of --kv-budget"
    assert reservations.missing_bytes(1, "a", MemoryDemand(80, 30)) == 10
    with pytest.raises(BudgetError):
        reservations.grant(1, "a", MemoryDemand(71, 0))


def test_shared_bytes_are_reserved_once_and_pass_to_the_last_holder() -> None:
    ledger, reservations = new_reservations()
    reservations.grant(1, "a", MemoryDemand(40))
    reservations.grant(3, "a", MemoryDemand(10))  # without the 30 bytes that it shares
    reservations.share({1: {"prefix": 30}, 3: {"prefix": 30}}, {3: 30})
    assert ledger.used(Tier.DEVICE, "a") == 50
    assert reservations.bytes_of(1) == reservations.bytes_of(3) == 10
    reservations.check(3, 40)
    assert reservations.violations == 0
    assert reservations.missing_bytes(3, "a", MemoryDemand(61)) == 1  # 50 of 70 are in use
    reservations.release(1)
    assert ledger.used(Tier.DEVICE, "a") == 40 == reservations.bytes_of(3)
    reservations.grant(1, "a", MemoryDemand(5))
    reservations.share({1: {"prefix": 30}, 3: {"prefix": 30}}, {1: 30})
    reservations.share({3: {}}, {3: -30})  # it has gone back behind the prefix
    assert reservations.bytes_of(1) == 35 and reservations.bytes_of(3) == 10
    for key in (1, 3):
        reservations.release(key)
    assert ledger.used(Tier.DEVICE) == 0
