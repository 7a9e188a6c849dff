"""Byte budgets hold at every instant."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder.core import BadParameter, BudgetError
from larder.store import ByteBudgets, ByteLedger, Reservation, Tier

TENANTS = ("a", "b")
OPERATION = st.tuples(
    st.sampled_from(["reserve", "release", "shrink", "lower"]),
    st.sampled_from(list(Tier)),
    st.sampled_from(TENANTS),
    st.integers(0, 60),
)


@pytest.mark.failure(number=23)
@given(st.lists(OPERATION, max_size=40), st.integers(0, 100), st.integers(0, 100))
def test_reservations_never_exceed_the_budgets(
    operations: list[tuple[str, Tier, str, int]], total: int, own: int
) -> None:
    ledger = ByteLedger(ByteBudgets(dict.fromkeys(Tier, total), dict.fromkeys(Tier, own)))
    open_ones: list[Reservation] = []
    ceiling = dict.fromkeys(Tier, total)
    for what, tier, tenant, count in operations:
        if what == "reserve":
            try:
                open_ones.append(ledger.reserve(tier, tenant, count))
            except BudgetError:
                assert ledger.free_bytes(tier, tenant) < count
        elif what == "lower":
            over = ledger.lower(tier, count)
            assert over == max(ledger.used(tier) - count, 0)
            ceiling[tier] = max(count, ledger.used(tier))
        elif what in ("release", "shrink") and open_ones:
            taken = open_ones.pop(count % len(open_ones))
            if what == "release":
                taken.release()
                taken.release()
            else:
                taken.shrink(count)
                open_ones.append(taken)
        for each in Tier:
            ceiling[each] = max(ledger.limit(each), min(ceiling[each], ledger.used(each)))
            assert ledger.used(each) == sum(r.bytes for r in open_ones if r.tier is each)
            assert ledger.used(each) <= ceiling[each]
            for name in TENANTS:
                mine = sum(r.bytes for r in open_ones if r.tier is each and r.tenant == name)
                assert ledger.used(each, name) == mine <= own


def test_zero_budget_refuses_reservations() -> None:
    ledger = ByteLedger(ByteBudgets({Tier.DISK: 0}))
    with pytest.raises(BudgetError, match="may hold 0 and hold 0"):
        ledger.reserve(Tier.DISK, "a", 1)
    ledger.reserve(Tier.DISK, "a", 0)
    with pytest.raises(BadParameter):
        ByteBudgets({Tier.DISK: -1})
    with pytest.raises(BadParameter):
        ledger.reserve(Tier.DISK, "a", -1)


def test_tenant_quota_leaves_room_for_others() -> None:
    ledger = ByteLedger(ByteBudgets({Tier.HOST: 100}, {Tier.HOST: 60}))
    ledger.reserve(Tier.HOST, "a", 60)
    with pytest.raises(BudgetError, match="this tenant may hold 60"):
        ledger.reserve(Tier.HOST, "a", 1)
    ledger.reserve(Tier.HOST, "b", 40)
    with pytest.raises(BudgetError, match="all tenants together"):
        ledger.reserve(Tier.HOST, "b", 1)


def test_lowered_budget_refuses_until_enough_is_released() -> None:
    ledger = ByteLedger(ByteBudgets({Tier.DISK: 100}))
    held = ledger.reserve(Tier.DISK, "a", 80)
    assert ledger.lower(Tier.DISK, 50) == 30
    with pytest.raises(BudgetError):
        ledger.reserve(Tier.DISK, "b", 1)
    held.shrink(40)
    ledger.reserve(Tier.DISK, "b", 10)
    assert ledger.used(Tier.DISK) == 50


@pytest.mark.failure(number=25)
def test_waiting_reservation_gets_released_bytes() -> None:
    ledger = ByteLedger(ByteBudgets({Tier.HOST: 10}))
    first = ledger.reserve(Tier.HOST, "a", 10)
    timer = threading.Timer(0.02, first.release)
    timer.start()
    ledger.reserve(Tier.HOST, "b", 10, wait_seconds=5.0)
    assert ledger.used(Tier.HOST) == ledger.used(Tier.HOST, "b") == 10
    with pytest.raises(BudgetError):  # never fits: not waited for
        ledger.reserve(Tier.HOST, "b", 11, wait_seconds=60.0)
    timer.join()


@pytest.mark.failure(number=23)
def test_concurrent_reservations_stay_within_the_budget() -> None:
    ledger = ByteLedger(ByteBudgets({Tier.HOST: 100}))
    highest, refused = [0], [0]

    def work(tenant: str) -> None:
        for count in range(200):
            try:
                with ledger.reserve(Tier.HOST, tenant, 7 + count % 40):
                    highest[0] = max(highest[0], ledger.used(Tier.HOST))
            except BudgetError:
                refused[0] += 1

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < highest[0] <= 100 and ledger.used(Tier.HOST) == 0


@pytest.mark.failure(number=24)
def test_empty_reservation_succeeds_over_budget() -> None:
    ledger = ByteLedger(ByteBudgets({Tier.HOST: 10}, {Tier.HOST: 10}))
    held = ledger.reserve(Tier.HOST, "a", 10)
    ledger.lower(Tier.HOST, 5)
    assert ledger.reserve(Tier.HOST, "a", 0).bytes == 0
    with pytest.raises(BudgetError):
        ledger.reserve(Tier.HOST, "a", 1)
    held.release()
    assert ledger.used(Tier.HOST) == 0


@pytest.mark.failure(number=23)
def test_pending_writes_are_added_to_the_measured_usage() -> None:
    ledger = ByteLedger(ByteBudgets({Tier.DISK: 100}))
    coming, there = ledger.reserve(Tier.DISK, "a", 30), ledger.reserve(Tier.DISK, "a", 20)
    there.release()  # what was written is in the next count
    ledger.reserve(Tier.HOST, "a", 5)
    ledger.set(Tier.DISK, {"a": 20, "b": 1})
    assert (ledger.used(Tier.DISK, "a"), ledger.used(Tier.DISK)) == (50, 51)
    coming.shrink(10)
    ledger.set(Tier.DISK, {"a": 20})
    assert ledger.used(Tier.DISK) == 30
    coming.release()
    ledger.set(Tier.DISK, {"a": 25})
    assert ledger.used(Tier.DISK) == 25
    ledger.reserve(Tier.DISK, "b", 7).release()
    ledger.set(Tier.DISK, {})
    assert ledger.used(Tier.DISK) == 0 and ledger.used(Tier.HOST) == 5
