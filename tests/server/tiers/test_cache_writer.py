"""Caches of the prefix backend: written to the store and restored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from larder import Engine
from larder.models import LoadedModel
from larder.server import ChatMessage, Durability, LocalEngineClient
from larder.store import LocalFileSystem, RestorePath, ThroughputEstimates, Tier
from server_core import Served, answered, box_question
from server_stores import Stored

pytestmark = pytest.mark.usefixtures("loads")


def talk(served: Stored | Served, session: str = "x", number: int = 1) -> list[ChatMessage]:
    turns = box_question(number)
    turns = answered(turns, served.ask(turns, session), "Why?")
    return answered(turns, served.ask(turns, session), "Sure?")


def hub_over(loaded: LoadedModel, stored: Stored) -> LocalEngineClient:
    return LocalEngineClient(
        Engine(loaded, policy="full"), persistence=stored.persistence, disk=stored.disk
    )


def cache_bytes(loaded: LoadedModel, policy: str = "full") -> int:
    """Cache bytes of a conversation of two turns."""
    served = Served(loaded, policy)
    talk(served)
    return served.core.sessions.find("a", "x").residency.nbytes


def turn_bytes(loaded: LoadedModel, policy: str) -> int:
    """Peak device bytes of a turn of such a conversation."""
    served = Served(loaded, policy)
    answered(talk(served), served.ask(box_question(2), "y"), "Why?")
    return served.core.reservations.peak


@pytest.mark.failure(number=8)
@pytest.mark.parametrize("policy", ["full", "limited"])
def test_restarted_server_restores_caches_and_answers_the_same(
    small: LoadedModel, tmp_path: Path, policy: str
) -> None:
    first, never = Stored(small, tmp_path, policy=policy), Served(small, policy)
    turns = talk(first)
    assert talk(never) == turns
    first.close()
    again = Stored(small, tmp_path, policy=policy)
    assert again.tier() == "disk"
    last = again.ask(turns, "x")
    other = never.ask(turns, "x")
    assert last.text == other.text
    report = last.result
    assert report.tier == "disk" and report.recomputed_tokens == 0
    assert report.restored_tokens == report.cached_tokens == other.result.cached_tokens > 0
    assert report.lossless == other.result.lossless
    assert again.disk.stats().rejected == {}


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["full", "limited"])
def test_many_sessions_alternate_in_little_memory(
    small: LoadedModel, tmp_path: Path, policy: str
) -> None:
    size = cache_bytes(small, policy)
    budgets = {"device": max(4 * size, turn_bytes(small, policy)), "host": 7 * size}
    stored, alone = Stored(small, tmp_path, policy=policy, **budgets), Served(small, policy)
    names = [f"n{number}" for number in range(8)]
    turns = {name: box_question(number) for number, name in enumerate(names)}
    for text in ("Why?", "Sure?"):
        for name in names:
            own, other = stored.ask(turns[name], name), alone.ask(turns[name], name)
            assert own.text == other.text
            turns[name] = answered(turns[name], own, text)
    tiers = stored.core.tiers
    assert tiers.parked["disk"] and tiers.restored["disk"] and not tiers.dropped
    assert not stored.disk.stats().rejected
    assert any(not stored.core.sessions.has("a", name) for name in names)


@pytest.mark.failure(number=1)
@pytest.mark.extended
def test_damaged_cache_is_recomputed(small: LoadedModel, tmp_path: Path) -> None:
    first, never = Stored(small, tmp_path), Served(small)
    turns = talk(first)
    talk(never)
    first.close()
    sizes = {file: file.stat().st_size for file in (tmp_path / "blobs").rglob("*.safetensors")}
    largest = max(sizes, key=lambda file: sizes[file])
    data = bytearray(largest.read_bytes())
    data[-9] ^= 1
    largest.write_bytes(data)
    again = Stored(small, tmp_path)
    last = again.ask(turns, "x")
    assert last.text == never.ask(turns, "x").text
    assert last.result.restored_tokens == 0 < last.result.recomputed_tokens
    assert again.disk.stats().rejected == {"damaged": 1}
    again.close()
    third = Stored(small, tmp_path)
    assert third.ask(answered(turns, last, "And?"), "x").result.restored_tokens > 0


@pytest.mark.failure(number=26)
def test_cache_is_recomputed_when_loading_is_slower(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Stored(small, tmp_path)
    turns = talk(first)
    first.close()
    monkeypatch.setattr(ThroughputEstimates, "choose", lambda *args: RestorePath.RECOMPUTE)
    again = Stored(small, tmp_path)
    last = again.ask(turns, "x")
    assert last.result.restored_tokens == 0 < last.result.recomputed_tokens
    assert again.disk.stats().rejected == {"slower": 1}
    monkeypatch.setattr(ThroughputEstimates, "choose", lambda *args: RestorePath.LOAD)
    again.core.tiers.evict(again.core.find("a", "x"))
    assert again.tier() == "disk"


class Gate(LocalFileSystem):
    """File system whose writes wait until it is opened."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_open = threading.Event()
        self.is_open.set()

    def create(self, path: str, data: bytes) -> None:
        assert self.is_open.wait(30)
        super().create(path, data)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gated")
    yield gate
    gate.is_open.set()


@pytest.mark.failure(number=6)
def test_slow_disk_does_not_stall_other_answers(
    small: LoadedModel, tmp_path: Path, gate: Gate
) -> None:
    stored = Stored(small, tmp_path, place=gate)
    slow, _ = stored.served.submit(box_question(1), "slow")
    other, _ = stored.served.submit(box_question(2), "other", max_new_tokens=40)
    gate.is_open.clear()
    while len(other.steps) < 30:
        assert stored.served.step()
    assert slow.report is None and slow.text  # its end is told when its turn is written
    gate.is_open.set()
    stored.run()
    assert slow.result.new_tokens == 4 and other.result.new_tokens == 40


@pytest.mark.failure(number=25)
@pytest.mark.extended
def test_requests_wait_while_a_full_tier_drains_to_a_slow_disk(
    small: LoadedModel, tmp_path: Path, gate: Gate
) -> None:
    size = cache_bytes(small)
    stored = Stored(small, tmp_path, place=gate, device=2 * size + size // 2, host=4 * size)
    turns = [talk(stored, f"n{number}", number) for number in range(2)]
    gate.is_open.clear()
    late, _ = stored.served.submit(box_question(7), "n7")
    for _ in range(50):
        stored.served.step()
    assert late.report is None
    gate.is_open.set()
    stored.run()
    assert late.result.new_tokens == 4 and not stored.core.tiers.dropped
    assert stored.ask(turns[0], "n0").result.recomputed_tokens == 0


@pytest.mark.failure(number=25)
def test_write_of_one_tenant_does_not_delay_another_at_its_quota(
    small: LoadedModel, tmp_path: Path, gate: Gate
) -> None:
    one = Served(small)
    one.ask(box_question(0), "x")
    size = one.core.sessions.find("a", "x").residency.nbytes
    quotas = {Tier.DEVICE: 5 * size, Tier.HOST: 3 * size}
    stored = Stored(small, tmp_path, Durability.NONE, place=gate, quotas=quotas)
    stored.ask(box_question(0), "n0")
    for number in range(4):
        stored.ask(box_question(number), f"b{number}", tenant="b")
    gate.is_open.clear()
    tiers = stored.core.tiers
    assert tiers.save(stored.core.sessions.find("a", "n0")) is not None
    assert tiers.is_writing() and not tiers.is_writing("b")
    late = [stored.served.submit(box_question(n), f"late{n}", tenant="b")[0] for n in range(5)]
    for _ in range(100):
        stored.served.step()
    assert all(each.report for each in late) and tiers.dropped and tiers.is_writing("a")
    gate.is_open.set()
    stored.run()


def test_writes_are_not_awaited_without_durability(
    small: LoadedModel, tmp_path: Path, gate: Gate
) -> None:
    stored = Stored(small, tmp_path, Durability.NONE, place=gate)
    gate.is_open.clear()
    client, _ = stored.served.submit(box_question(1), "x")
    while client.report is None:
        assert stored.served.step()
    gate.is_open.set()
    stored.close()
    assert Stored(small, tmp_path, place=gate).core.find("a", "x").turns


def test_strongest_durability_stores_the_cache(small: LoadedModel, tmp_path: Path) -> None:
    killed, never = Stored(small, tmp_path, Durability.SNAPSHOT), Served(small)
    turns = talk(killed)
    talk(never)
    again = Stored(small, tmp_path)
    last = again.ask(turns, "x")
    assert last.text == never.ask(turns, "x").text and last.result.recomputed_tokens == 0
    assert last.result.restored_tokens > 0


@pytest.mark.extended
def test_cache_of_a_lossy_codec_is_not_used_for_exact_requests(
    small: LoadedModel, tmp_path: Path
) -> None:
    first = Stored(small, tmp_path, codec="int8")
    turns = talk(first)
    first.close()
    again = Stored(small, tmp_path, codec="int8")
    last = again.ask(turns, "x")
    assert last.result.restored_tokens and not last.result.lossless
    more = answered(turns, last, "And?")
    again.close()
    third = Stored(small, tmp_path, codec="int8")
    exact = third.ask(more, "x", exact=True)
    assert exact.result.restored_tokens == 0 < exact.result.recomputed_tokens
    assert exact.result.lossless


@pytest.mark.failure(number=22)
@pytest.mark.extended
def test_idle_stored_sessions_in_memory_are_bounded(small: LoadedModel, tmp_path: Path) -> None:
    size = cache_bytes(small)
    stored = Stored(small, tmp_path, device=3 * size, host=4 * size)
    turns = {f"n{number}": box_question(number, 1) for number in range(24)}
    held = []
    for name, messages in turns.items():
        turns[name] = answered(messages, stored.ask(messages, name), "Why?")
        held.append(len(stored.core.sessions))
    assert max(held) <= 12  # those that come later take no more
    assert len(stored.persistence.list_sessions("a")) == 24
    for name in ("n0", "n11", "n23"):
        assert stored.ask(turns[name], name).result.session == name
    anonymous = stored.ask(turns["n5"])  # found by what was said
    assert anonymous.result.session == "n5"


def test_released_session_is_prefetched_again(small: LoadedModel, tmp_path: Path) -> None:
    stored = Stored(small, tmp_path, policy="limited")
    turns = talk(stored)
    done = stored.core.admin.release(stored.core.idle("a", "x"))
    stored.run()
    left = done.result().residency
    assert left.tier == "disk" == stored.tier() and left.nbytes > left.host_bytes == 0
    assert not stored.core.sessions.has("a", "x")
    [view] = stored.persistence.list_sessions("a")
    assert view.turns == 4 and view.epoch == 2 and view.tier_bytes["disk"] > 0
    assert view.kept_tokens + view.evicted_tokens > view.kept_tokens > 0 and not view.lossless
    back = stored.core.admin.prefetch(stored.core.idle("a", "x"))
    stored.run()
    assert back.result().residency.tier == "device"
    assert stored.ask(turns, "x").result.tier == "device"


def test_session_view_does_not_load_a_stored_cache(small: LoadedModel, tmp_path: Path) -> None:
    stored = Stored(small, tmp_path)
    talk(stored)
    done = stored.core.admin.release(stored.core.idle("a", "x"))
    stored.run()
    assert done.result().residency.tier == "disk"
    stored.close()
    again = Stored(small, tmp_path)
    with closing(hub_over(small, again)) as hub:
        held = hub.kept("a", "x")
        assert (held.tokens, held.layers, held.tier) == (0, (), "disk")
        assert hub.stats().tier_bytes["device"] == 0 and not hub.stats().restored
        assert hub.prefetch("a", "x").tier == "device" and hub.kept("a", "x").tokens > 0


def test_pin_survives_a_restart(small: LoadedModel, tmp_path: Path) -> None:
    first = Stored(small, tmp_path)
    turns = talk(first)
    with closing(hub_over(small, first)) as hub:
        assert hub.pin("a", "x").pinned and not hub.fork("a", "x", "y").pinned
    first.store.close()
    second = Stored(small, tmp_path)
    assert {view.name: view.pinned for view in second.persistence.list_sessions("a")} == {
        "x": True,
        "y": False,
    }
    second.ask(turns, "x")
    assert second.core.find("a", "x").usage.is_pinned
    second.close()
    third = Stored(small, tmp_path)
    with closing(hub_over(small, third)) as hub:
        assert hub.session("a", "x").view.pinned and not hub.unpin("a", "x").pinned
    third.store.close()
    [x] = [
        view for view in Stored(small, tmp_path).persistence.list_sessions("a") if view.name == "x"
    ]
    assert not x.pinned and x.turns == 6


@pytest.mark.extended
def test_stored_cache_is_compacted_to_its_budget(small: LoadedModel, tmp_path: Path) -> None:
    stored, never = Stored(small, tmp_path, policy="limited"), Served(small, "limited")
    turns = talk(stored)
    talk(never)
    session = stored.core.find("a", "x")
    before, bound = session.residency.occupancy, session.serving.heads * session.serving.tokens
    assert before.entries <= bound, "at rest it is as small as its budget already"
    done = stored.core.admin.compact(stored.core.idle("a", "x"))
    stored.run()
    assert (
        done.result().residency.occupancy.entries <= bound
        and done.result().residency.occupancy.read == before.read
    )
    stored.served.check()
    stored.close()
    again = Stored(small, tmp_path, policy="limited")
    assert again.ask(turns, "x").result.recomputed_tokens == 0
    assert (
        again.core.find("a", "x").residency.occupancy.entries
        <= never.core.find("a", "x").residency.occupancy.entries
    )
