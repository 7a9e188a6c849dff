"""Edge cases of HTTP requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from starlette.types import Message

from larder.server import (
    ApiKeyAuth,
    Archive,
    HttpSettings,
    Listener,
    Principal,
    Request,
    Ticket,
    create_app,
    sse_event,
)
from server.fake_engine_client import NAME, FakeHub
from server.http.conftest import ANNE
from server.http.running_server import Running


def test_sse_event_escapes_all_line_separators() -> None:
    result = {"text": "a\u2028b\u2029c\u0085d\ne\r\n\x0b\x1c"}
    lines = sse_event(result).decode().splitlines()
    assert lines[1:] == [""] and json.loads(lines[0].removeprefix("data: ")) == result


@pytest.mark.parametrize(
    ("name", "harmless", "other"),
    [
        ("best_of", 1, 2),
        ("ignore_eos", False, True),
        ("stop_token_ids", [], [7]),
        ("guided_json", None, {"type": "object"}),
    ],
)
def test_unsupported_fields_that_change_the_answer_are_refused(
    http: httpx2.Client, served: Running, name: str, harmless: Any, other: Any
) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
    assert http.post("/v1/chat/completions", json={**body, name: harmless}).status_code == 200
    result = http.post("/v1/chat/completions", json={**body, name: other})
    assert result.status_code == 400
    assert (result.json()["error"]["code"], result.json()["error"]["param"]) == (
        "unsupported_parameter",
        name,
    )
    assert len(served.hub.asked) == 1


def test_token_prompt_is_detokenized_off_the_event_loop(
    http: httpx2.Client, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = list[bool]()

    def detokenize(ids: Sequence[int]) -> str:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            loops.append(False)
        else:
            loops.append(True)
        return FakeHub().detokenize(ids)

    monkeypatch.setattr(served.hub, "detokenize", detokenize)
    result = http.post("/v1/completions", json={"model": NAME, "prompt": [104, 105]})
    assert result.json()["choices"][0]["text"].startswith("You said: hi") and loops == [False]


def test_metadata_update_during_an_answer_is_kept(
    anne: OpenAI, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = anne.conversations.create(metadata={"topic": "old"})
    submit = served.hub.submit

    def noted(request: Request, listener: Listener) -> Ticket:
        anne.conversations.update(conversation.id, metadata={"topic": "new"})
        return submit(request, listener)

    monkeypatch.setattr(served.hub, "submit", noted)
    anne.responses.create(model=NAME, input="one", conversation=conversation.id)
    assert anne.conversations.retrieve(conversation.id).metadata == {"topic": "new"}


def response_to_aborting_client(path: str, parts: Sequence[bytes]) -> tuple[list[int], FakeHub]:
    """Statuses sent to a client that disconnects after some parts of its body, and the engine."""
    hub, statuses = FakeHub(), list[int]()
    door = ApiKeyAuth({ANNE: Principal("anne", is_operator=True)})
    app = create_app(hub, door, Archive(), HttpSettings(max_body_bytes=1000))
    coming = [{"type": "http.request", "body": part, "more_body": True} for part in parts]

    async def receive() -> Message:
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = {"authorization": f"Bearer {ANNE}", "content-type": "application/json"}
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(app(scope, receive, send))
    return statuses, hub


@pytest.mark.parametrize("path", ["/v1/sessions/x/import", "/v1/chat/completions"])
def test_request_aborted_by_the_client_is_not_a_server_error(path: str) -> None:
    [status], hub = response_to_aborting_client(path, [b'{"model": '])
    assert status < 500 and not (hub.asked or hub.held)
    [status], hub = response_to_aborting_client(path, [b"x" * 600] * 2)
    assert status == 413 and not (hub.asked or hub.held)
