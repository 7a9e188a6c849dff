"""Broken, missing and full disks under a server, and clock changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

import server_core
from larder.models import LoadedModel
from larder.server import ApiError, Archive, ChatMessage, LoopbackAuth
from larder.store import open_file_system
from server.fake_engine_client import NAME
from server.http.running_server import running
from server_core import Served, answered, box_question
from server_stores import Stored
from store.file_systems import BROKEN, FULL, QUOTA, READ_ONLY, Faulty, refusing

DAY = 86_400


def talk(served: Served | Stored) -> list[ChatMessage]:
    turns = box_question(1)
    turns = answered(turns, served.ask(turns, "x"), "Why?")
    return answered(turns, served.ask(turns, "x"), "Sure?")


@pytest.fixture
def expected(small: LoadedModel) -> tuple[list[ChatMessage], str]:
    """Third request to a server without a store, and its answer."""
    never = Served(small)
    turns = talk(never)
    return turns, never.ask(turns, "x").text


@pytest.mark.failure(number=4)
@pytest.mark.parametrize("error", [FULL, READ_ONLY, BROKEN, QUOTA])
def test_turns_refused_by_a_broken_disk_are_written_after_recovery(
    small: LoadedModel, tmp_path: Path, expected: tuple[list[ChatMessage], str], error: int
) -> None:
    place = Faulty(open_file_system(str(tmp_path / "disk")))
    stored = Stored(small, tmp_path, place=place)
    turns = talk(stored)
    assert turns == expected[0]
    place.before = refusing(error, "create", "replace", "touch")
    last = stored.ask(turns, "x")
    assert last.text == expected[1] and last.result.durable is False
    assert stored.core.unwritten.is_degraded
    place.before = lambda what, path: None
    stored.store.parts.executor.breaker.record_success()  # as if it had rested
    for _ in range(10):  # seconds, by this clock
        stored.run()
    assert not stored.core.unwritten.is_degraded
    stored.close()
    again = Stored(small, tmp_path, place=place)
    assert [turn.text for turn in again.core.find("a", "x").turns][-1] == expected[1]


@pytest.mark.failure(number=4)
@pytest.mark.parametrize("is_served", [True, False])
def test_missing_store_does_not_stop_answers(
    small: LoadedModel, tmp_path: Path, expected: tuple[list[ChatMessage], str], is_served: bool
) -> None:
    stored = Stored(small, tmp_path)
    turns = talk(stored)
    if not is_served:
        stored.close()
    shutil.rmtree(tmp_path / "blobs")
    if not is_served:
        stored = Stored(small, tmp_path)
        with pytest.raises(ApiError) as refused:  # who brings no text
            stored.core.find("a", "x")
        assert refused.value.code in ("session_unreadable", "session_not_found")
    last = stored.ask(turns, "x")
    # Who lost the tokens of its answers has their text to go on from, as a server that is new.
    assert last.text == (expected[1] if is_served else Served(small).ask(turns, "x").text)
    assert (last.result.session, last.result.durable) == ("x", True)
    stored.close()
    again = Stored(small, tmp_path)
    assert len(again.core.find("a", "x").turns) == (3 if is_served else 1)
    assert again.ask(answered(turns, last, "So?"), "x").result.session == "x"


def test_clock_change_does_not_change_answers(
    small: LoadedModel,
    tmp_path: Path,
    expected: tuple[list[ChatMessage], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def set_often(start: int) -> Iterator[int]:
        for number in range(10_000):
            yield start + number + (-1) ** number * 400 * DAY

    monkeypatch.setattr(server_core, "count", set_often)
    stored = Stored(small, tmp_path)
    assert talk(stored) == expected[0]
    stored.close()
    again = Stored(small, tmp_path)
    last = again.ask(expected[0], "x")
    assert last.text == expected[1] and last.result.durable is True
    assert [view.name for view in again.persistence.list_sessions("a")] == ["x"]


@pytest.mark.failure(number=4)
def test_full_archive_is_a_503_and_keeps_its_responses(tmp_path: Path) -> None:
    path = tmp_path / "archive.sqlite"
    with closing(Archive(path)) as archive, running(LoopbackAuth(), archive=archive) as served:
        with httpx2.Client(base_url=served.url, timeout=20) as client:
            asked = {"model": NAME, "input": "one " * 2000}
            first = client.post("/v1/responses", json=asked)
            assert first.status_code == 200
            [(pages,)] = archive._base.execute("PRAGMA page_count").fetchall()
            archive._base.execute(f"PRAGMA max_page_count = {pages}").fetchall()
            codes = list[str]()
            for path_ in ("/v1/responses", "/v1/conversations"):
                body = asked if path_ == "/v1/responses" else {"metadata": {"a": "b" * 500}}
                for _ in range(20):
                    reply = client.post(path_, json=body)
                    if reply.status_code != 200:
                        break
                codes.append(reply.json()["error"]["code"])
                assert reply.status_code == 503
            assert codes == ["store_full", "store_full"]
            assert client.get(f"/v1/responses/{first.json()['id']}").status_code == 200
            archive._base.execute("PRAGMA max_page_count = 100000").fetchall()
            assert client.post("/v1/responses", json=asked).status_code == 200
