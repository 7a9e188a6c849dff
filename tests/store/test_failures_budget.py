"""Byte budgets of a store: nothing is kept beyond them, and no conversation is lost by them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from larder import LarderError
from larder.cache import SequenceCache
from larder.core import BudgetError
from larder.store import ByteBudgets, RestorePath, ThroughputEstimates, Tier, open_file_system
from store.caches import (
    IDS,
    SPEC,
    TALK,
    WHO,
    asking,
    compressed,
    files,
    load,
    read,
    save,
    snapshot,
    store_at,
)
from store.file_systems import Faulty

pytestmark = pytest.mark.usefixtures("small_chunks")
KIB = 1024
INDEX = 520 * KIB  # what an index and its growth take of a budget
LONGER = tuple(range(1000, 1160))


def disk(limit: int) -> dict[str, ByteBudgets]:
    return {"budgets": ByteBudgets({Tier.DISK: limit})}


def on_disk(folder: Path) -> int:
    logs = [p for p in files(folder, "home") if p.name.startswith("manifest.sqlite")]
    index = [path for path in logs if not path.name.endswith("-shm")]
    return sum(path.stat().st_size for path in [*files(folder), *index])


OPERATION = st.tuples(
    st.sampled_from(["save", "save int4", "load", "fork", "remove", "chunks", "lower"]),
    st.integers(0, 2),
    st.integers(1, 60),
)


@pytest.mark.failure(number=23)
@pytest.mark.extended
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=3)
@given(st.lists(OPERATION, min_size=4, max_size=9))
def test_budgets_hold_under_random_operations(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    limit = INDEX + 160 * KIB
    budgets = ByteBudgets({Tier.DISK: limit, Tier.HOST: 400 * KIB})
    store = store_at(folder, budgets=budgets)
    texts: dict[str, tuple[int, ...]] = {}
    for what, number, length in operations:
        name, ids = f"s{number}", tuple(range(length, 3 * length))
        try:
            if what.startswith("save"):
                codec = "int4" if "int4" in what else "raw"
                store.sessions.save(WHO, name, ids, snapshot(read(ids), codec))
                texts[name] = ids
            elif what == "fork":
                store.sessions.fork(WHO, name, "s0")
                texts["s0"] = texts[name]
            elif what == "remove":
                store.sessions.remove(WHO, name)
                del texts[name]
            elif what == "chunks":
                store.prefixes.save(WHO, ids, read(ids), asking().identity)
            elif what == "lower":
                limit = max(limit - KIB, on_disk(folder))
                store.parts.ledger.lower(Tier.DISK, limit)
        except LarderError:
            pass
        for own, ids in texts.items():
            loaded = load(store, own)
            assert loaded.ids == ids
        assert on_disk(folder) <= limit
        assert store.parts.ledger.used(Tier.DISK) <= limit
        assert store.parts.ledger.used(Tier.HOST) == 0
        assert on_disk(folder) <= store.parts.ledger.used(Tier.DISK)


@pytest.mark.failure(number=23)
def test_processes_of_one_machine_share_a_budget(tmp_path: Path) -> None:
    limit = INDEX + 90 * KIB
    stores = [store_at(tmp_path, **disk(limit)) for _ in range(2)]
    kept = 0
    for number in range(10):
        ids = tuple(range(1000 * number, 1000 * number + 200))
        cache = snapshot(read(ids), "int8")
        store = stores[number % 2]
        try:
            kept += bool(store.sessions.save(WHO, f"s{number}", ids, cache).spans)
        except BudgetError:
            pass
        assert on_disk(tmp_path) <= limit
    assert 2 <= kept < 10
    before = [store.parts.ledger.used(Tier.DISK) for store in stores]
    stores[0].sessions.remove(WHO, "s0")
    stores[1].parts.blobs.reserve(WHO, 0).release()
    assert stores[1].parts.ledger.used(Tier.DISK) < before[1]


@pytest.mark.failure(number=23)
@pytest.mark.extended
@pytest.mark.parametrize("moment", ["before", "after"])
def test_sweep_counts_blobs_being_written(tmp_path: Path, moment: str) -> None:
    stopped, goes_on = threading.Event(), threading.Event()

    def hook(what: str, path: str) -> None:
        if what == "replace" and path.startswith("blobs/") and not stopped.is_set():
            stopped.set()
            assert goes_on.wait(20)

    file_system = Faulty(open_file_system(str(tmp_path / "store")), **{moment: hook})
    store = store_at(tmp_path, file_system, **disk(INDEX + 400 * KIB))
    ledger, limit = store.parts.ledger, INDEX + 400 * KIB
    saving = threading.Thread(target=save, args=(store, LONGER))
    saving.start()
    assert stopped.wait(20)
    before = ledger.used(Tier.DISK)
    store.maintenance.sweep()
    during = ledger.used(Tier.DISK)
    goes_on.set()
    saving.join()
    assert before <= during <= limit
    assert load(store).cache is not None
    assert on_disk(tmp_path) <= ledger.used(Tier.DISK)
    used = ledger.used(Tier.DISK)
    store.maintenance.sweep()
    assert ledger.used(Tier.DISK) == used


@pytest.mark.failure(number=24)
def test_session_larger_than_the_budget_keeps_its_tokens(tmp_path: Path) -> None:
    store = store_at(tmp_path, **disk(INDEX - 20 * KIB))
    record = store.sessions.save(WHO, TALK, LONGER, snapshot(read(LONGER)))
    assert record.spans == () and store.parts.unwritten.counts() == {"budget": 1}
    loaded = load(store)
    assert loaded.ids == LONGER and loaded.cache is None
    small = store.sessions.save(WHO, TALK, LONGER[:40], snapshot(read(LONGER[:40]), "int4"))
    assert small.spans and load(store).cache is not None


@pytest.mark.failure(number=24)
def test_zero_disk_budget_refuses_saves(tmp_path: Path) -> None:
    store = store_at(tmp_path, **disk(0))
    with pytest.raises(BudgetError, match="raise the budget"):
        save(store)
    assert store.sessions.load(WHO, TALK, asking()) is None
    assert files(tmp_path, "store/blobs") == []


@pytest.mark.failure(number=24)
def test_host_budget_limits_loads_and_saves(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    store = store_at(tmp_path, budgets=ByteBudgets({Tier.HOST: KIB}))
    loaded = load(store)
    assert loaded.reason == "budget" and loaded.ids == IDS
    assert store.prefixes.match_prefix(WHO, LONGER, asking().identity, SPEC) is None
    record = store.sessions.save(WHO, "new", LONGER, snapshot(read(LONGER)))
    assert record.spans == () and load(store, "new").ids == LONGER


@pytest.mark.failure(number=24)
def test_lowered_disk_budget_evicts_on_the_next_save(tmp_path: Path) -> None:
    store = store_at(tmp_path, **disk(INDEX + 900 * KIB))
    for number in range(3):
        ids = tuple(range(1000 * number, 1000 * number + 1500))
        store.sessions.save(WHO, f"s{number}", ids, snapshot(read(ids), "int8"))
    before = store.parts.ledger.used(Tier.DISK)
    over = store.parts.ledger.lower(Tier.DISK, before - 5 * KIB)
    assert over == 5 * KIB
    ids = tuple(range(500, 520))
    store.sessions.save(WHO, "new", ids, snapshot(read(ids), "int8"))
    assert store.parts.ledger.used(Tier.DISK) <= before - 5 * KIB
    reasons = [load(store, f"s{number}").reason for number in range(3)]
    assert reasons[0] == "evicted" and all(load(store, f"s{n}").ids for n in range(3))


@pytest.mark.extended
def test_eviction_takes_old_epochs_then_least_recent_sessions(tmp_path: Path) -> None:
    now = [0.0]

    def later() -> float:
        now[0] += 1.0
        return now[0]

    store = store_at(tmp_path, clock=later)
    texts = {name: tuple(range(n * 1000, n * 1000 + 800)) for n, name in enumerate("abc")}
    for name, ids in texts.items():
        for stop in (799, 800):
            store.sessions.save(WHO, name, ids[:stop], snapshot(compressed(ids[:stop])))
    ledger, state = store.parts.ledger, sum(ref.bytes for ref in load(store, "a").record.spans)
    for leaves, left in ((3, set()), (1, {"a"}), (1, {"a", "b"})):
        used = ledger.used(Tier.DISK)
        ledger.lower(Tier.DISK, used)
        store.parts.blobs.reserve("", (leaves - 1) * state + 1).release()
        gone = {name for name in texts if load(store, name).reason == "evicted"}
        assert gone == left


@pytest.mark.extended
@pytest.mark.parametrize("made", [read, compressed])
def test_pinned_session_is_evicted_last(
    tmp_path: Path, made: Callable[[tuple[int, ...]], SequenceCache]
) -> None:
    store = store_at(tmp_path)
    texts = {name: tuple(range(n * 1000, n * 1000 + 400)) for n, name in enumerate("abc")}
    for name, ids in texts.items():
        store.sessions.save(WHO, name, ids, snapshot(made(ids)))
    for reply in ("no", "yes"):
        epoch = store.sessions.label(WHO, "a", {"pinned": reply}, 1 + (reply == "yes")).epoch
    assert store.sessions.label(WHO, "a", {"pinned": "yes"}, epoch).epoch == epoch == 3
    again = store_at(tmp_path)
    ledger, state = again.parts.ledger, sum(ref.bytes for ref in load(again, "c").record.spans)
    for wanted, left in ((state // 2, "b"), (state // 2, "bc"), (3 * state, "abc")):
        ledger.lower(Tier.DISK, ledger.used(Tier.DISK))
        again.parts.blobs.make_room("", wanted)
        gone = {name for name in texts if load(again, name).reason == "evicted"}
        assert gone == set(left)


@pytest.mark.failure(number=25)
@pytest.mark.extended
def test_daily_write_budget_is_enforced(tmp_path: Path) -> None:
    now = [0.0]
    store = store_at(tmp_path, written_bytes=30 * KIB, clock=lambda: now[0])
    save(store)
    assert load(store).cache is not None
    record = store.sessions.save(WHO, "new", LONGER, snapshot(read(LONGER)))
    assert record.spans == () and "budget" in store.parts.unwritten.counts()
    assert load(store, "new").ids == LONGER
    now[0] = 86400.0
    again = store_at(tmp_path, written_bytes=300 * KIB, clock=lambda: now[0])
    assert again.sessions.save(WHO, "new", LONGER, snapshot(read(LONGER))).spans


@pytest.mark.failure(number=26)
def test_cache_faster_to_recompute_is_not_loaded(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    rates = store.parts.throughput
    rates.read(10**6, 1.0)
    for _ in range(30):
        rates.loaded(Tier.DISK, 10, 1.0)
    assert rates.choose(Tier.DISK, 1000, 10) is RestorePath.RECOMPUTE
    loaded = load(store)
    assert loaded.reason == "slower" and loaded.ids == IDS
    assert store.prefixes.match_prefix(WHO, IDS, asking().identity, SPEC) is None
    assert ThroughputEstimates().choose(Tier.DISK, 1000, 10) is RestorePath.LOAD


@pytest.mark.failure(number=22)
@pytest.mark.extended
def test_stored_sessions_are_not_charged_to_host_memory(tmp_path: Path) -> None:
    store, source = store_at(tmp_path), random.Random(0)
    for number in range(20):
        ids = tuple(source.choices(range(99), k=9))
        store.sessions.save(WHO, f"s{number}", ids)
    assert store.parts.ledger.used(Tier.HOST) == 0
    assert len(store.sessions.heads(WHO)) == 20


def test_tenant_quota_is_shared_by_all_models(tmp_path: Path) -> None:
    limit, now = 120 * KIB, count(0.0)
    options: Any = {"budgets": ByteBudgets(tenant={Tier.DISK: limit}), "models": ("lora", "other")}
    store = store_at(tmp_path, clock=lambda: next(now), **options)

    def held(principal: str) -> int:
        return store.parts.ledger.used(Tier.DISK, store.parts.tenant(principal))

    def filled(principal: str, first: int) -> None:
        for number in range(first, first + 3):
            ids = tuple(range(1000 * number, 1000 * number + 150))
            store.sessions.save(principal, f"s{number}", ids, snapshot(read(ids), "int8"))

    filled("anne@lora", 0)
    one = held("anne@lora")
    assert limit / 3 < one <= limit, "more than a share of each model"
    filled("ben", 3)
    of_ben = held("ben")
    store.close()
    now = count(1e6)  # after the grace time of what another process has written
    store = store_at(tmp_path, clock=lambda: next(now), **options)
    filled("anne@other", 10)
    filled("anne", 20)
    total = sum(held(each) for each in ("anne", "anne@lora", "anne@other"))
    assert total <= limit and 0 < held("anne") and held("anne@lora") < one
    assert held("ben") == of_ben, "others make no room for her"
