"""Prefetch of sessions that a workflow uses next."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from larder import Engine
from larder.engine import ModelSnapshots
from larder.models import LoadedModel
from larder.server import (
    Durability,
    EngineOptions,
    LocalEngineClient,
    Request,
    SessionState,
    StoreDiskTier,
    StoreSessionPersistence,
)
from larder.store import Store, Tier
from server_core import Served, answered, box_question, user
from server_engine_clients import Waiting
from server_stores import Stored


def on_disk(stored: Stored, name: str = "x") -> SessionState:
    """A session whose cache only the store has."""
    session = stored.core.sessions.find("a", name)
    stored.core.tiers.save(session)
    stored.run()
    stored.core.tiers.drop(session)
    assert session.residency.tier == "disk"
    return session


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["full", "limited"])
@pytest.mark.parametrize(("eviction", "tier"), [("kvflow", "device"), ("lru", "disk")])
def test_next_session_of_a_workflow_is_prefetched_under_kvflow_only(
    small: LoadedModel, tmp_path: Path, policy: str, eviction: str, tier: str
) -> None:
    stored, plain = Stored(small, tmp_path, policy=policy, eviction=eviction), Served(small, policy)
    turns = box_question(1)
    first = stored.ask(turns, "x")
    plain.ask(turns, "x")
    session, turns = on_disk(stored), answered(turns, first, "Why?")
    stored.core.announce("a", {"x": 1})
    stored.ask(box_question(2), "y")
    assert session.residency.tier == tier
    again = stored.ask(turns, "x")
    assert again.result.tier == tier and again.text == plain.ask(turns, "x").text
    assert not stored.core.tiers.started
    stored.close()


def test_request_joins_a_prefetch_in_progress(small: LoadedModel, tmp_path: Path) -> None:
    stored = Stored(small, tmp_path, eviction="kvflow")
    turns, loads, load = box_question(1), list[str](), stored.disk.load

    def counted(*arguments: object) -> object:
        loads.append("load")
        return load(*arguments)  # pyright: ignore

    stored.disk.load = counted  # pyright: ignore
    turns = answered(turns, stored.ask(turns, "x"), "Why?")
    on_disk(stored)
    stored.core.prefetcher.prefetch(stored.core.sessions.find("a", "x"))
    client = stored.ask(turns, "x")
    assert loads == ["load"] and not stored.core.tiers.started
    assert client.result.tier == "disk" and client.result.restored_tokens > 0
    stored.close()


def test_session_removed_during_a_prefetch_releases_its_memory(
    small: LoadedModel, tmp_path: Path
) -> None:
    stored = Stored(small, tmp_path, eviction="kvflow")
    stored.ask(box_question(1), "x")
    session = on_disk(stored)
    stored.core.prefetcher.prefetch(session)
    stored.core.forget(session)
    stored.run()
    assert stored.core.ledger.used(Tier.HOST) == 0 and not stored.core.tiers.in_host
    stored.close()


@pytest.mark.parametrize(("steps", "tier"), [(1, "host"), (2, "device")])
def test_prefetch_does_not_evict_sessions_due_as_early(
    small: LoadedModel, steps: int, tier: str
) -> None:
    probe = Served(small)
    probe.ask(box_question(1), "x")
    served = Served(small, device=int(1.3 * probe.core.reservations.peak), eviction="kvflow")
    served.ask(box_question(1), "x", steps={"": 1})
    session = served.core.sessions.find("a", "x")
    assert served.core.tiers.offload(session)
    served.ask(box_question(2), "y", steps={"": steps})
    served.core.announce("a", {"x": 1})
    served.run()
    assert session.residency.tier == tier


def test_failed_prefetch_leaves_the_load_to_the_request(small: LoadedModel) -> None:
    served, plain = Served(small, eviction="kvflow"), Served(small)
    turns = box_question(1)
    first = served.ask(turns, "x")
    plain.ask(turns, "x")
    assert served.core.tiers.offload(served.core.sessions.find("a", "x"))
    restore = served.core.tiers.restore_from_host

    def failing(session: SessionState) -> None:
        raise RuntimeError("out of memory")

    served.core.tiers.restore_from_host = failing
    served.core.announce("a", {"x": 1})
    served.run()
    served.core.tiers.restore_from_host = restore
    assert served.core.ledger.used(Tier.DEVICE) == 0
    turns = answered(turns, first, "Why?")
    assert served.ask(turns, "x").text == plain.ask(turns, "x").text


def test_session_absent_from_memory_is_prefetched(small: LoadedModel, tmp_path: Path) -> None:
    first = Stored(small, tmp_path)
    first.ask(box_question(1), "x")
    first.close()
    store = Store(str(tmp_path / "blobs"), tmp_path / "home", secret=b"s" * 32)
    kept = StoreSessionPersistence(store, small.decoder.spec)
    disk = StoreDiskTier(kept, ModelSnapshots(store, small, "raw"), Durability.TURN)
    engine = Engine(small, policy="full")
    client = LocalEngineClient(
        engine, EngineOptions(eviction="kvflow"), persistence=kept, disk=disk
    )
    with closing(store), closing(client):
        waiting = Waiting()
        request = Request(
            "a", tuple(box_question(2)), "y", max_new_tokens=2, steps={"x": 1, "nobody": 1}
        )
        client.submit(request, waiting)
        assert waiting.over.wait(30)
        client._prefetching.submit(int).result(30)
        for _ in range(200):
            if client.sessions("a")[0].tier == client.sessions("a")[1].tier == "device":
                break
        assert {view.name: view.tier for view in client.sessions("a")} == {
            "x": "device",
            "y": "device",
        }


def test_prefetches_by_name_are_bounded_and_end_at_shutdown(small: LoadedModel) -> None:
    client, going = (
        LocalEngineClient(Engine(small, policy="full"), EngineOptions(eviction="kvflow")),
        Event(),
    )
    with closing(client):
        client._prefetching.submit(going.wait)
        for number in range(100):
            client._prefetch_later("a", f"s{number % 80}", 1)
        assert len(client._absent) == 64
        going.set()
        client._prefetching.submit(int).result(30)
        assert not client._absent
    client._prefetch_later("a", "x", 1)
    assert not client._absent


def offloaded(served: Served, name: str) -> SessionState:
    """A session of tenant a in host memory, which a workflow uses next."""
    served.ask(box_question(1), name, steps={"": 1})
    session = served.core.sessions.find("a", name)
    assert served.core.tiers.offload(session)
    return session


@pytest.mark.parametrize(("others", "tier"), [(("b",), "host"), (("b", "a"), "device")])
def test_prefetch_evicts_sessions_of_its_own_tenant_only(
    small: LoadedModel, others: tuple[str, ...], tier: str
) -> None:
    probe = Served(small)
    probe.ask(box_question(1), "x")
    room = (len(others) + 0.3) * probe.core.reservations.peak
    served = Served(small, device=int(room), eviction="kvflow")
    session = offloaded(served, "x")
    idle = {
        tenant: served.ask(box_question(2), "y", tenant=tenant).result.session for tenant in others
    }
    served.core.announce("a", {"x": 1})
    served.run()
    find = served.core.sessions.find
    tiers = {each: find(each, name).residency.tier for each, name in idle.items()}
    assert session.residency.tier == tier
    assert tiers["b"] == "device" and tiers.get("a", "host") == "host"


@pytest.mark.extended
def test_prefetch_does_not_evict_host_memory_of_others(small: LoadedModel, tmp_path: Path) -> None:
    probe = Stored(small, tmp_path / "probe", eviction="kvflow")
    probe.ask(box_question(1), "x")
    size = on_disk(probe).residency.saved_cache
    probe.close()
    assert size is not None
    stored = Stored(small, tmp_path, host=8 * size.load_bytes, eviction="kvflow")
    stored.ask(box_question(1), "x")
    session = on_disk(stored)
    held = list[SessionState]()
    while stored.core.ledger.free_bytes(Tier.HOST, "a") >= size.load_bytes:
        stored.ask(box_question(9 + len(held)), f"y{len(held)}", tenant="b")
        held.append(stored.core.sessions.find("b", f"y{len(held)}"))
        assert stored.core.tiers.offload(held[-1])
        stored.run()
    stored.core.announce("a", {"x": 1})
    stored.run()
    assert session.residency.tier == "disk"
    assert [each.residency.tier for each in held] == ["host"] * len(held)
    stored.close()


def test_prefetched_transcript_does_not_evict_others(small: LoadedModel, tmp_path: Path) -> None:
    stored = Stored(small, tmp_path, eviction="kvflow")
    core, tiers = stored.core, stored.core.tiers
    stored.ask(box_question(1, 20), "y", tenant="b")
    tiers.drop(core.sessions.find("b", "y"))
    core.ledger.lower(Tier.HOST, core.ledger.used(Tier.HOST))
    loaded = core.sessions.open("a", "x", core.serving)
    loaded.transcript.opening_messages = (user("Why?"),)
    with tiers.evicting_only("a"):
        assert not tiers.charge_transcript(loaded)
    assert core.sessions.has("b", "y")
    assert tiers.charge_transcript(loaded) and not core.sessions.has("b", "y")
    stored.close()
