"""Turns that the store cannot write: reported, counted and written later, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from larder import Engine, LarderError
from larder.core import BudgetError, Damaged, StoreError, StoreFull, StoreSlow
from larder.models import LoadedModel
from larder.server import (
    ApiError,
    Archive,
    Durability,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    create_app,
)
from larder.store import open_file_system
from server.http.running_server import listening
from server_core import answered, box_question
from server_engine_clients import failing
from server_stores import Stored
from store.file_systems import FULL, Faulty, refusing

ERRORS: dict[str, LarderError] = {
    "full": StoreFull("The disk is full: make room."),
    "slow": StoreSlow("The disk does not answer: see to it."),
    "damaged": Damaged("A record is not what was written."),
    "failed": StoreError("The disk fails: see to it."),
    "budget": BudgetError("The budget of the store is spent: raise it."),
}


def refused_turns(stored: Stored, error: LarderError) -> Any:
    """Context in which the store refuses every turn."""
    return failing(stored.store.sessions, "append", error)  # pyright: ignore


@pytest.mark.failure(number=4)
@pytest.mark.parametrize("reason", ERRORS)
def test_unwritten_turn_is_reported_and_written_later(
    small: LoadedModel, tmp_path: Path, reason: str
) -> None:
    stored = Stored(small, tmp_path)
    unwritten = stored.core.unwritten
    first = stored.ask(box_question(1), "x")
    assert first.result.durable is True and not unwritten.is_degraded
    with refused_turns(stored, ERRORS[reason]):
        second = stored.ask(answered(box_question(1), first, "Why?"), "x")
        assert second.result.durable is False and unwritten.is_degraded
        other = stored.ask(box_question(2), "y")
        assert other.result.durable is False and len(unwritten) == 2
        again = stored.ask(answered(box_question(1), first, "Why?"), "x")  # the same request
        assert again.text == second.text and again.result.durable is False
    assert unwritten.counts == {reason: 2}
    for _ in range(10):  # seconds, by this clock
        stored.run()
    assert not unwritten.is_degraded and unwritten.counts == {reason: 2}
    assert stored.ask(box_question(2), "y").result.durable is True
    late = Stored(small, tmp_path)
    assert [len(late.core.find("a", name).turns) for name in ("x", "y")] == [2, 1]


@pytest.mark.failure(number=4)
@pytest.mark.parametrize("reason", ERRORS)
def test_strict_durability_refuses_unwritten_turns(
    small: LoadedModel, tmp_path: Path, reason: str
) -> None:
    stored = Stored(small, tmp_path, Durability.STRICT)
    first = stored.ask(box_question(1), "x")
    assert first.result.durable is True
    asked = answered(box_question(1), first, "Why?")
    with refused_turns(stored, ERRORS[reason]):
        for turns, name in ((asked, "x"), (box_question(2), "y")):
            client, _ = stored.served.submit(turns, name)
            stored.run()
            error = client.error
            assert isinstance(error, ApiError)
            assert (error.status, error.code) == (503, "store_full")
            assert (error.retry_after is not None) == (reason == "slow")
    assert stored.core.unwritten.is_degraded and len(stored.core.unwritten) == 0
    assert len(stored.core.find("a", "x").turns) == 1
    assert not stored.core.sessions.has("a", "y")
    assert stored.core.unwritten.counts == {reason: 2}
    second = stored.ask(asked, "x")
    assert second.result.durable is True and not stored.core.unwritten.is_degraded
    stored.close()
    late = Stored(small, tmp_path)
    assert len(late.core.find("a", "x").turns) == 2
    with pytest.raises(ApiError, match="no session"):
        late.core.find("a", "y")


@pytest.mark.failure(number=4)
def test_refused_turn_degrades_health_for_a_minute(small: LoadedModel, tmp_path: Path) -> None:
    stored = Stored(small, tmp_path, Durability.STRICT)
    with refused_turns(stored, ERRORS["full"]):
        stored.served.submit(box_question(1), "x")
        stored.run()
    clock = stored.core.clock  # each look takes a second
    started = clock()
    while stored.core.unwritten.is_degraded and clock() < started + 99:
        pass
    assert 40 < clock() - started <= 62
    stored.close()


@pytest.mark.failure(number=4)
def test_unwritten_turns_are_written_at_shutdown(small: LoadedModel, tmp_path: Path) -> None:
    stored = Stored(small, tmp_path)
    with refused_turns(stored, ERRORS["full"]):
        stored.ask(box_question(1), "x")
    stored.close()
    assert len(Stored(small, tmp_path).core.find("a", "x").turns) == 1


@pytest.mark.failure(number=4)
def test_unwritten_turn_without_durability_degrades_health(
    small: LoadedModel, tmp_path: Path
) -> None:
    stored = Stored(small, tmp_path, Durability.NONE)
    with refused_turns(stored, ERRORS["full"]):
        assert stored.ask(box_question(1), "x").result.durable is None
    assert stored.core.unwritten.is_degraded and stored.core.unwritten.counts == {"full": 1}


@pytest.mark.failure(number=4)
def test_removed_session_with_unwritten_turns_does_not_degrade_health(
    small: LoadedModel, tmp_path: Path
) -> None:
    stored = Stored(small, tmp_path)
    with refused_turns(stored, ERRORS["full"]):
        stored.ask(box_question(1), "x")
    for gone in stored.core.remove("a", "x"):
        gone.result(30)
    assert not stored.core.unwritten.is_degraded


class Disk:
    """A folder on a disk that may be full."""

    def __init__(self, folder: Path) -> None:
        self.is_full = False
        self._full = refusing(FULL, "create", "replace", "touch")
        self.place = Faulty(open_file_system(str(folder / "disk")), before=self._before)

    def _before(self, what: str, path: str) -> None:
        if self.is_full:
            self._full(what, path)


@contextmanager
def serving(
    loaded: LoadedModel, folder: Path, durability: Durability
) -> Iterator[tuple[httpx2.Client, Disk]]:
    disk = Disk(folder)
    stored = Stored(loaded, folder, durability, place=disk.place)
    hub = LocalEngineClient(
        Engine(loaded, policy="full"), persistence=stored.persistence, disk=stored.disk
    )
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=4))
    with listening(app) as url, httpx2.Client(base_url=url, timeout=20) as client:
        yield client, disk


def chat(client: httpx2.Client, name: str, **more: object) -> httpx2.Response:
    body = {"model": "characters", "messages": [{"role": "user", "content": f"Who is {name}?"}]}
    return client.post("/v1/chat/completions", json={**body, "session_id": name, **more})


def events(reply: httpx2.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def numbers(client: httpx2.Client) -> list[str]:
    return client.get("/metrics").text.splitlines()


@pytest.mark.failure(number=4)
@pytest.mark.extended
def test_full_disk_is_reported_in_every_response(small: LoadedModel, tmp_path: Path) -> None:
    with serving(small, tmp_path, Durability.TURN) as (client, disk):
        assert chat(client, "a").json()["kv"]["durable"] is True
        assert client.get("/health").json() == {"status": "ok"}
        disk.is_full = True
        assert chat(client, "b").json()["kv"]["durable"] is False
        *_, last, done = events(chat(client, "c", stream=True))
        assert last["kv"]["durable"] is False and done == "[DONE]"
        asked = {"model": "characters", "input": "Who is d?"}
        assert client.post("/v1/responses", json=asked).json()["kv"]["durable"] is False
        health = client.get("/health")
        assert health.status_code == 200
        assert health.json() == {"status": "degraded", "problems": ["turns_not_durable"]}
        result = numbers(client)
        assert "larder_sessions_not_durable 3.0" in result
        failed = [line for line in result if line.startswith("larder_turns_not_durable_total{")]
        assert sum(float(line.split()[-1]) for line in failed) == 3
        listed = client.get("/v1/sessions").json()["data"]
        assert {each["id"]: each["durable"] for each in listed}["a"] is True
        assert sum(not each["durable"] for each in listed) == 3
        disk.is_full = False


@pytest.mark.failure(number=4)
@pytest.mark.extended
def test_full_disk_with_strict_durability_is_a_503(small: LoadedModel, tmp_path: Path) -> None:
    with serving(small, tmp_path, Durability.STRICT) as (client, disk):
        assert chat(client, "a").json()["kv"]["durable"] is True
        disk.is_full = True
        refused = chat(client, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_full")
        assert refused.headers["x-should-retry"] == "false"
        *_, last = events(chat(client, "c", stream=True))
        assert last["error"]["code"] == "store_full"
        response = client.post("/v1/responses", json={"model": "characters", "input": "Who?"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "store_full")
        assert client.get("/health").json()["status"] == "degraded"
        assert "larder_sessions_not_durable 0.0" in numbers(client)
        assert [each["id"] for each in client.get("/v1/sessions").json()["data"]] == ["a"]
