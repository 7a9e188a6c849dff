"""Resident memory of a process that saves and loads, in bytes, against the host budget."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from builders import a_layer, a_spec
from larder.store import ByteBudgets, CacheRequirements, Tier
from store.caches import POLICY, WHO, go_on, identity, read, snapshot, store_at

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SLACK = 16 << 20  # of libraries that are loaded meanwhile, and of the allocator
WIDE = a_spec(*(a_layer(kv_heads=128, group=1, index=index) for index in range(4)))


def resident(what: str) -> int:
    """Bytes of memory that the process has now, or had at most since it was reset."""
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{what}:")]
    return 1024 * int(line.split()[1])


@pytest.mark.failure(number=23)
@pytest.mark.extended
@pytest.mark.skipif(not RESET.exists(), reason="only Linux tells the peak")
def test_resident_memory_stays_within_the_host_budget(tmp_path: Path) -> None:
    ids = tuple(range(480))
    cache = read(ids[:1], spec=WIDE)
    for start in range(1, len(ids), 40):
        go_on(cache, ids[start : start + 40], ids[:start])
    budget = 3 * cache.nbytes
    assert cache.nbytes > 15 << 20
    store = store_at(tmp_path, budgets=ByteBudgets({Tier.HOST: budget}))
    gc.collect()
    before = resident("VmRSS")
    RESET.write_text("5")
    record = store.sessions.save(WHO, "talk", ids, snapshot(cache, "int8"))
    assert record.spans and resident("VmHWM") - before <= budget + SLACK
    RESET.write_text("5")
    before = resident("VmRSS")
    found = store.sessions.load(WHO, "talk", CacheRequirements(identity(), POLICY, WIDE))
    assert found is not None and found.cache is not None, found
    assert resident("VmHWM") - before <= budget + SLACK
