"""Retries of a request after the server died while it stored the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from larder import Engine
from larder.models import LoadedModel
from larder.server import (
    RETRY_HEADER,
    Archive,
    ArchiveRows,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    create_app,
)
from server.http.running_server import listening
from server_core import characters
from server_engine_clients import persistence_in

RETRIED = {RETRY_HEADER: "1"}
# Rows that the archive writes for a response: what was asked and answered, the conversation, the
# response where it is stored, and the key of the request where it has one.
ROWS = 3


class ProcessDied(RuntimeError):
    """Crash of the server process."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return characters()


@contextmanager
def serving(folder: Path, loaded: LoadedModel) -> Iterator[httpx2.Client]:
    """A server over what earlier ones have left in a folder."""
    hub = LocalEngineClient(
        Engine(loaded, policy="full"), persistence=persistence_in(folder, loaded)
    )
    archive = Archive(folder / "archive.sqlite")
    app = create_app(hub, LoopbackAuth(), archive, HttpSettings(max_new_tokens=4))
    own: dict[str, Any] = {"headers": {"connection": "close"}, "timeout": 20}
    with listening(app) as url, httpx2.Client(**own, base_url=url) as client:
        yield client


@contextmanager
def crash_before_row(patch: pytest.MonkeyPatch, step: int) -> Iterator[None]:
    """While the process dies in front of the given row that the archive writes; behind all of
    them, before the client hears of it."""
    written, insert = list[object](), ArchiveRows._insert

    def inserted(self: ArchiveRows, *args: Any) -> Any:
        if len(written) == step:
            raise ProcessDied
        written.append(args)
        return insert(self, *args)

    def die(*args: object, **kwargs: object) -> None:
        raise ProcessDied

    with patch.context() as patched:
        patched.setattr(ArchiveRows, "_insert", inserted)
        patched.setattr("larder.server.http.responses.JSONResponse", die)
        yield


def assert_unanswered(client: httpx2.Client, body: dict[str, Any], **headers: str) -> None:
    """Ask, and get no answer."""
    with suppress(httpx2.HTTPError):  # the connection may go before the error is there
        assert client.post("/v1/responses", json=body, headers=headers).status_code == 500


def messages_of(client: httpx2.Client, conversation: str) -> list[tuple[str, str]]:
    items = client.get(f"/v1/conversations/{conversation}/items?order=asc").json()["data"]
    return [(item["role"], item["content"][0]["text"]) for item in items]


def conversation_of_one_turn(client: httpx2.Client) -> str:
    """A conversation of one turn."""
    name = client.post("/v1/conversations", json={}).json()["id"]
    body = {"model": "characters", "input": "One?", "conversation": name}
    assert client.post("/v1/responses", json=body).is_success
    return name


@pytest.mark.failure(number=18)
@pytest.mark.extended
@pytest.mark.parametrize(
    "step, store", [*((step, True) for step in range(ROWS + 2)), (0, False), (ROWS, False)]
)
def test_retry_after_a_crash_makes_one_turn(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, store: bool
) -> None:
    with serving(tmp_path, loaded) as client:
        name = conversation_of_one_turn(client)
        body = {"model": "characters", "input": "Two?", "conversation": name, "store": store}
        with crash_before_row(monkeypatch, step):
            assert_unanswered(client, body)
        before = messages_of(client, name)
        assert len(before) in (2, 4)  # all of the turn, or nothing of it
    with serving(tmp_path, loaded) as client:
        again = client.post("/v1/responses", json=body, headers=RETRIED).json()
        result = [("user", "Two?"), ("assistant", again["output"][0]["content"][0]["text"])]
        assert messages_of(client, name)[2:] == result
        assert before[2:] in ([], result)
        turns = client.get(f"/v1/sessions/{name}").json()["turns"]
        assert turns == 4
        assert client.post("/v1/responses", json=body, headers=RETRIED).json() == again
        assert len(messages_of(client, name)) == 4


@pytest.mark.failure(number=18)
@pytest.mark.extended
@pytest.mark.parametrize("store", [True, False])
def test_idempotency_key_is_answered_once(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: bool
) -> None:
    own = {"idempotency-key": "a key of mine"}
    with serving(tmp_path, loaded) as client:
        name = conversation_of_one_turn(client)
        body = {"model": "characters", "input": "Two?", "conversation": name, "store": store}
        with crash_before_row(monkeypatch, ROWS + store + 1):
            assert_unanswered(client, body, **own)
    with serving(tmp_path, loaded) as client:
        first = client.post("/v1/responses", json=body, headers=own).json()
        other = {**body, "input": "Three?"}
        assert client.post("/v1/responses", json=other).is_success
        assert client.post("/v1/responses", json=body, headers=own).json() == first
        assert [text for role, text in messages_of(client, name) if role == "user"] == [
            "One?",
            "Two?",
            "Three?",
        ]
        reused = client.post("/v1/responses", json=other, headers=own)
        assert reused.status_code == 422
        assert reused.json()["error"]["code"] == "idempotency_key_reused"
