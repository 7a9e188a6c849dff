"""What caches may hold is spoken for before they hold it, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from larder.core.errors import BudgetError
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.store.ledger import ByteBudgets, ByteLedger, Tier

LIMIT, OWN = 100, 70
NEEDS = some.builds(MemoryDemand, some.integers(0, 60), some.integers(0, 30))
MOVES = some.lists(
    some.tuples(some.integers(0, 3), some.one_of(NEEDS, some.just(None), some.integers(0, LIMIT))),
    max_size=40,
)


def a_purse(limit: int = LIMIT) -> tuple[ByteLedger, DeviceReservations]:
    ledger = ByteLedger(ByteBudgets({Tier.DEVICE: limit}, {Tier.DEVICE: OWN}))
    return ledger, DeviceReservations(ledger)


@given(moves=MOVES)
def test_23_what_is_spoken_for_is_never_more_than_the_budget(
    moves: list[tuple[int, MemoryDemand | None | int]],
) -> None:
    ledger, purse = a_purse()
    held: dict[int, MemoryDemand] = {}
    for key, move in moves:
        tenant = "ab"[key % 2]
        if isinstance(move, int):  # the budget is lowered: what is held may only shrink
            if ledger.lower(Tier.DEVICE, move):
                ledger.lower(Tier.DEVICE, LIMIT)
        elif move is None:
            purse.give_back(key)
            held.pop(key, None)
        else:
            missing = purse.missing(key, tenant, move)
            try:
                purse.grant(key, tenant, move)
            except BudgetError:
                assert missing > 0
            else:
                held[key] = move
                assert purse.fits(tenant, move) or missing == 0
        passing = max((need.transient_bytes for need in held.values()), default=0)
        spoken = sum(need.bytes for need in held.values()) + passing
        assert ledger.used(Tier.DEVICE) == spoken <= ledger.limit(Tier.DEVICE)
        for owner in "ab":
            own = sum(need.bytes for key, need in held.items() if "ab"[key % 2] == owner)
            assert ledger.used(Tier.DEVICE, owner) == own <= OWN
    for key in list(held):
        purse.give_back(key)
    assert ledger.used(Tier.DEVICE) == 0


def test_what_holds_more_than_was_spoken_for_is_counted_and_charged() -> None:
    ledger, purse = a_purse()
    purse.grant(1, "a", MemoryDemand(40, 10))
    purse.check(1, 50)
    assert purse.violations == 0
    purse.check(1, 51)
    assert purse.violations == 1 and ledger.used(Tier.DEVICE) == 51
    purse.give_back(1)
    assert ledger.used(Tier.DEVICE) == 0


def test_what_could_never_fit_is_known() -> None:
    _, purse = a_purse()
    assert purse.fits("a", MemoryDemand(70, 30)) and not purse.fits("a", MemoryDemand(71, 0))
    assert (
        not purse.fits("a", MemoryDemand(70, 31))
        and purse.missing(1, "a", MemoryDemand(80, 30)) == 10
    )
    with pytest.raises(BudgetError):
        purse.grant(1, "a", MemoryDemand(71, 0))
