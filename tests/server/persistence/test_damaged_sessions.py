"""Sessions with one flipped bit in their stored data."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from larder import Engine
from larder.models import LoadedModel
from larder.server import (
    ApiError,
    Archive,
    ChatMessage,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    Metrics,
    create_app,
)
from larder.store import MANIFEST_FILE, Record, blob_path
from server.http.running_server import listening
from server_chats import HISTORY, asked
from server_core import Served, answered, box_question, user
from server_engine_clients import ask, flip, hub_in, persistence_in
from server_stores import Stored

pytestmark = pytest.mark.usefixtures("loads")
KINDS = ["transcript", "tokens", "cache", "beside", "record", "row", "newest", "every"]
TEXT_IS_GONE = ("transcript", "every")


def record_of(stored: Stored) -> Record:
    record = stored.store.sessions.head("a", "x")
    assert record is not None and record.transcript is not None and record.spans
    return record


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def damage(folder: Path, record: Record, kind: str) -> None:
    """Flip one bit in each copy of a part; of records there is one in the index, too."""
    files: Iterable[Path] = ()
    blobs = folder / "blobs"
    if kind in ("record", "newest"):
        files = (blobs / record.path,)
    elif kind == "every":
        files = (blobs / record.path).parent.iterdir()
    elif kind != "row":
        refs = {
            "transcript": (record.transcript,),
            "tokens": (record.tokens,),
            "cache": record.spans,
            "beside": (record.beside,),
        }
        files = (blobs / blob_path(ref.digest) for ref in refs[kind] if ref is not None)
    for file in files:
        file.write_bytes(flipped(file.read_bytes()))
    if kind in ("row", "newest", "every"):
        least = 0 if kind == "every" else record.epoch
        with closing(sqlite3.connect(folder / "home" / MANIFEST_FILE)) as base, base:
            for epoch, data in base.execute("SELECT epoch, record FROM epochs").fetchall():
                if epoch >= least:
                    result = "UPDATE epochs SET record = ? WHERE epoch = ?"
                    base.execute(result, (flipped(data), epoch))


def talk(served: Stored | Served) -> list[ChatMessage]:
    """Messages of a conversation of two turns and the next request."""
    turns = [*HISTORY, user("Where is Ann?")]
    for more in ("Why?", "Sure?"):
        turns = answered(turns, served.ask(turns, "x"), more)
    return turns


@pytest.mark.failure(number=1)
@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_session_with_a_flipped_bit_continues(
    small: LoadedModel, tmp_path: Path, kind: str
) -> None:
    policy = asked("epicache") if kind == "beside" else {}
    first, never = Stored(small, tmp_path, **policy), Served(small, **policy)  # pyright: ignore
    turns = talk(first)
    assert talk(never) == turns
    first.close()
    closed = Stored(small, tmp_path, **policy)  # pyright: ignore
    damage(tmp_path, record_of(closed), kind)
    closed.close()
    again = Stored(small, tmp_path, **policy)  # pyright: ignore
    if kind in TEXT_IS_GONE:  # and with it the very tokens of former answers
        never = Served(small, **policy)  # pyright: ignore
    last = again.ask(turns, "x")
    assert last.text == never.ask(turns, "x").text and last.result.session == "x"
    assert again.core.restorer.restarted.counts() == (
        {"damaged": 1} if kind in TEXT_IS_GONE else {}
    )
    if kind in ("transcript", "tokens", "cache", "beside"):
        assert again.disk.stats().rejected["damaged"]
    more = answered(turns, last, "And?")
    assert again.ask(more, "x").text == never.ask(more, "x").text
    again.close()
    healed = Stored(small, tmp_path, **policy)  # pyright: ignore
    transcript = healed.core.find("a", "x").turns
    assert sum(len(each.messages) + 1 for each in transcript) == len(more) + 1
    assert healed.ask(answered(more, last, "Then?"), "x").report is not None
    assert healed.disk.stats().rejected == {}


@pytest.mark.failure(number=1)
def test_damaged_session_is_an_error_only_without_the_text(
    small: LoadedModel, tmp_path: Path
) -> None:
    with hub_in(tmp_path, small) as hub:
        first = ask(hub, box_question(1), "x")
        ask(hub, answered(box_question(1), first, "Why?"), "y")
    flip(tmp_path, small, "x")
    with hub_in(tmp_path, small) as hub:
        for _ in range(2):
            for call in (hub.session, hub.export, hub.fork):
                with pytest.raises(ApiError, match="cannot be loaded") as refused:
                    call("a", "x")
                assert refused.value.code == "session_unreadable"
        went_on = ask(hub, answered(box_question(1), first, "Sure?"), "x")
        assert went_on.result.session == "x" and len(hub.session("a", "x").turns) == 4
        assert 'larder_sessions_restarted_total{reason="damaged"} 1.0' in (
            Metrics(hub).text().decode().splitlines()
        )
    with hub_in(tmp_path, small) as hub:
        assert len(hub.session("a", "x").turns) == 4


@pytest.mark.failure(number=1)
def test_session_repaired_by_another_server_is_not_restarted(
    small: LoadedModel, tmp_path: Path
) -> None:
    first = Served(small, persistence=persistence_in(tmp_path, small))
    turns = answered(box_question(1), first.ask(box_question(1), "x"), "Why?")
    flip(tmp_path, small, "x")
    late, other = (Served(small, persistence=persistence_in(tmp_path, small)) for _ in range(2))
    client, _ = late.submit(turns, "x", max_new_tokens=30)
    assert late.step()
    mended = other.ask(turns, "x", max_new_tokens=3)
    late.run()
    assert isinstance(client.error, ApiError) and client.error.status == 409
    assert late.ask(turns, "x", max_new_tokens=3).text == mended.text


@pytest.mark.failure(number=1)
@pytest.mark.extended
def test_damaged_session_continues_from_the_archive(small: LoadedModel, tmp_path: Path) -> None:
    persistence = persistence_in(tmp_path, small)
    hub = LocalEngineClient(Engine(small, policy="full"), persistence=persistence)
    app = create_app(
        hub, LoopbackAuth(), Archive(tmp_path / "archive.sqlite"), HttpSettings(max_new_tokens=4)
    )
    with listening(app) as url:
        name = httpx2.post(f"{url}/v1/conversations", json={}).json()["id"]
        body = {"model": "characters", "conversation": name}
        assert httpx2.post(f"{url}/v1/responses", json={**body, "input": "One?"}).is_success
    record = persistence._store.sessions.head("local", name)
    assert record is not None
    damage(tmp_path, record, "transcript")
    hub = LocalEngineClient(
        Engine(small, policy="full"), persistence=persistence_in(tmp_path, small)
    )
    app = create_app(
        hub, LoopbackAuth(), Archive(tmp_path / "archive.sqlite"), HttpSettings(max_new_tokens=4)
    )
    with listening(app) as url:
        answer = httpx2.post(f"{url}/v1/responses", json={**body, "input": "Two?"})
        assert answer.is_success and answer.json()["kv"]["session"] == name
        assert httpx2.get(f"{url}/v1/sessions/{name}").json()["turns"] == 4
