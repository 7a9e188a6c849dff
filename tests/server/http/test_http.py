"""Authentication, refusals and disconnects over plain HTTP."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from larder.server import Archive, Arrival, HttpSettings, LoopbackAuth, create_app
from server.fake_engine_client import NAME, FakeHub
from server.http.conftest import ANNE, BOB
from server.http.running_server import Running, awaited, running

OPEN = {"/", "/health", "/live", "/page.css", "/page.js", "/map.js", "/talk.js"}


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **more}


def error(reply: httpx2.Response, status: int) -> dict[str, Any]:
    """The error of a refused request: never more than its four fields."""
    assert reply.status_code == status, reply.text
    result = reply.json()
    assert list(result) == ["error"] and set(result["error"]) == {
        "message",
        "type",
        "param",
        "code",
    }
    return result["error"]


def routes(found: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Path and method of every route, those of routers inside included."""
    for route in found:
        inside = vars(route).get("original_router")
        if inside is not None:
            yield from routes(inside.routes)
        else:
            yield from ((route.path, method) for method in route.methods)


@pytest.mark.failure(number=32)
def test_only_the_page_and_health_are_open_without_a_key(served: Running) -> None:
    """All routes of the application, in the schema or not, and unknown ones."""
    app = create_app(FakeHub(), LoopbackAuth(), Archive(), HttpSettings())
    result = {(path, m.upper()) for path, own in app.openapi()["paths"].items() for m in own}
    paths = set(routes(app.routes))
    assert len(result) > 30 and {(path.replace(":path", ""), m) for path, m in paths} >= result
    paths |= {("/nowhere", "GET"), ("/v1/nowhere", "POST")}
    with httpx2.Client(base_url=served.url) as client:
        for path, method in sorted(paths):
            place = re.sub(r"\{[^}]+\}", "x", path)
            if path in OPEN:
                continue
            reply = client.request(method, place)
            if method == "HEAD":
                assert reply.status_code == 401
                continue
            if place.startswith("/v1/messages"):  # Anthropic's form
                assert reply.json()["error"]["type"] == "authentication_error"
                continue
            assert error(reply, 401)["code"] == "invalid_api_key", (method, place)
        for given in ("Bearer sk-wrong", ANNE, f"Basic {ANNE}", "Bearer", f"Bearer {ANNE}x"):
            error(client.get("/v1/sessions", headers={"authorization": given}), 401)
        assert all(client.get(path).status_code == 200 for path in OPEN)
    assert not served.hub.asked


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"[" * 20_000, 400, None),
        (b'{"model": "m"}', 400, "messages"),
        (b'{"model": "m", "messages": []}', 400, "messages"),
        (b'{"model": "m", "messages": [{"role": "king", "content": "x"}]}', 400, "messages.0.role"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
        (b'{"model": "m", "messages": [{"role": "user"}], "max_tokens": 0}', 400, "max_tokens"),
        (b'{"model": "m", "messages": [{"role": "user"}], "temperature": NaN}', 400, None),
        (
            b'{"model": "m", "messages": [{"role": "user"}], "seed": 1' + b"0" * 9000 + b"}",
            400,
            None,
        ),
        (b" " * 100_001, 413, None),
    ],
)
def test_bad_bodies_are_refused(
    http: httpx2.Client, served: Running, content: bytes, status: int, param: str | None
) -> None:
    headers = {"content-type": "application/json"}
    result = error(http.post("/v1/chat/completions", content=content, headers=headers), status)
    assert param is None or result["param"] == param
    assert not served.hub.asked


def test_requests_with_prompts_are_announced_until_they_are_submitted(
    http: httpx2.Client, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = list[str]()

    class Noted(Arrival):
        def __init__(self) -> None:
            events.append("announced")

        def end(self) -> None:
            events.append("ended")

    submit = FakeHub.submit

    def submitted(self: FakeHub, request: Any, listener: Any) -> Any:
        events.append("submitted")
        return submit(self, request, listener)

    monkeypatch.setattr(FakeHub, "arrival", lambda self: Noted())
    monkeypatch.setattr(FakeHub, "submit", submitted)
    assert http.post("/v1/chat/completions", json=chat("Hi")).status_code == 200
    assert events[:3] == ["announced", "submitted", "ended"] and "announced" not in events[3:]
    events.clear()
    error(http.post("/v1/chat/completions", json={"model": NAME}), 400)
    assert events == ["announced", "ended"]
    events.clear()
    http.post("/v1/embeddings", json={"model": NAME, "input": "x"})
    assert events == []


def test_body_without_content_length_is_bounded(http: httpx2.Client, served: Running) -> None:
    def pieces() -> Any:
        for _ in range(11):
            yield b" " * 10_000

    reply = http.post("/v1/chat/completions", content=pieces())
    assert error(reply, 413)["code"] == "request_too_large"


@pytest.mark.failure(number=30)
@pytest.mark.parametrize("name", ["a" * 256, "a\tb", " ", "\x7f", "a\x85b"])
@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key", "header"])
def test_invalid_session_names_are_refused(
    http: httpx2.Client, served: Running, name: str, field: str
) -> None:
    headers = {"x-session-id": name.encode("latin-1")} if field == "header" else {}
    body = chat("x") if field == "header" else chat("x", **{field: name})
    if field == "header" and name in (" ", "\x7f"):
        return  # no client sends these in a header
    result = error(http.post("/v1/chat/completions", json=body, headers=headers), 400)
    assert result["code"] == "invalid_session_id"


@pytest.mark.failure(number=30)
@pytest.mark.parametrize("name", ["../../etc/passwd", "a@b", "héllo 🍞", "a/b/pin", "%2e%2e%2f"])
def test_session_name_of_plain_text_round_trips_through_urls(
    http: httpx2.Client, served: Running, name: str
) -> None:
    """Failure test 30."""
    http.post("/v1/chat/completions", json=chat("x", session_id=name))
    [session] = http.get("/v1/sessions").json()["data"]
    assert session["id"] == name
    place = f"/v1/sessions/{''.join(f'%{byte:02x}' for byte in name.encode())}"
    assert http.get(place).json()["id"] == name
    assert http.post(f"{place}/pin").json()["pinned"]
    assert http.delete(place).json()["deleted"] is True
    assert error(http.get(place), 404)["code"] == "session_not_found"


def test_session_name_in_a_header_precedes_body_and_cache_key(
    http: httpx2.Client, served: Running
) -> None:
    body = chat("x", session_id="body", prompt_cache_key="key")
    for headers in ({"x-session-id": "head", "thread-id": "t"}, {"thread-id": "t"}, {}):
        http.post("/v1/chat/completions", json=body, headers=headers)
    http.post("/v1/chat/completions", json=chat("x", prompt_cache_key="key"))
    http.post("/v1/chat/completions", json=chat("x"))
    named = [asked.session for asked in served.hub.asked]
    assert named == ["head", "t", "body", "key", None]


@pytest.mark.failure(number=18)
def test_busy_session_is_a_409_and_busy_cache_key_is_ignored(
    http: httpx2.Client, served: Running
) -> None:
    """Failure test 18, as far as HTTP has a part in it."""
    reply = http.post("/v1/chat/completions", json=chat("busy", session_id="one"))
    assert error(reply, 409)["code"] == "session_busy"
    assert reply.headers["retry-after"] == "2" and "x-should-retry" not in reply.headers
    assert http.post("/v1/chat/completions", json=chat("busy", prompt_cache_key="k")).is_success
    assert served.hub.asked[-1].session is None


def test_permanent_refusals_disable_client_retries(http: httpx2.Client) -> None:
    result = http.post("/v1/chat/completions", json=chat("refuse store_full 503"))
    assert result.headers["x-should-retry"] == "false"
    assert "x-should-retry" not in http.post("/v1/chat/completions", json=chat("break")).headers


def test_idle_stream_sends_ping_comments(http: httpx2.Client, served: Running) -> None:
    body = chat("wait", stream=True)
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert sum(next(lines) == ": ping" for _ in range(6)) == 2
    assert served.hub.tickets[0].cancelled.wait(10)


@pytest.mark.failure(number=19)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_client_cancels_its_request(served: Running, path: str, stream: bool) -> None:
    """Failure test 19, as far as HTTP has a part in it."""
    same = {"model": NAME, "stream": stream}
    body = {"prompt": "wait", "input": "wait", "messages": [{"role": "user", "content": "wait"}]}
    wanted = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[path]
    headers = {"authorization": f"Bearer {ANNE}"}
    with pytest.raises(httpx2.TimeoutException):
        with httpx2.Client(timeout=httpx2.Timeout(5, read=0.04)) as client:
            content = {**same, wanted: body[wanted]}
            client.post(f"{served.url}/v1/{path}", json=content, headers=headers)
    for _ in range(1000):  # the client may have been gone before its request was read
        if served.hub.tickets:
            break
        time.sleep(0.01)
    assert served.hub.tickets[0].cancelled.wait(10)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize("stream", [True, False])
def test_answer_in_progress_ends_with_an_error_when_the_server_stops(
    path: str, stream: bool
) -> None:
    wanted = {"chat/completions": "messages", "responses": "input"}[path]
    body = {"model": NAME, "stream": stream, wanted: [{"role": "user", "content": "wait"}]}
    with ThreadPoolExecutor(1) as pool, httpx2.Client(timeout=30) as client:
        with running(LoopbackAuth()) as server:
            reply = pool.submit(client.post, f"{server.url}/v1/{path}", json=body)
            assert awaited(lambda: bool(server.hub.tickets))
            if stream:
                time.sleep(0.5)  # its head and first pings are sent
        assert "The server is stopping: try again later." in reply.result().text
        assert server.hub.tickets[0].cancelled.wait(10)


@pytest.mark.failure(number=29)
def test_objects_of_other_tenants_are_not_found(
    http: httpx2.Client, anne: OpenAI, bob: OpenAI, served: Running
) -> None:
    """Failure test 29: objects of another tenant are answered as unknown ones, byte for byte."""
    conversation = anne.conversations.create()
    response = anne.responses.create(model=NAME, input="secret", conversation=conversation.id)
    other = {"authorization": f"Bearer {BOB}"}
    for path in (
        f"/v1/conversations/{conversation.id}",
        f"/v1/conversations/{conversation.id}/items",
        f"/v1/responses/{response.id}",
        f"/v1/sessions/{conversation.id}",
        f"/v1/sessions/{conversation.id}/kept",
    ):
        assert http.get(path).status_code == 200
        theirs = http.get(path, headers=other)
        unknown = http.get(path.replace("_", "_0"), headers=other)
        assert (theirs.status_code, theirs.content) == (404, unknown.content)
    assert http.get("/v1/sessions", headers=other).json()["data"] == []
    for more in ({"conversation": conversation.id}, {"previous_response_id": response.id}):
        reply = http.post(
            "/v1/responses", json={"model": NAME, "input": "x", **more}, headers=other
        )
        assert error(reply, 404)["code"].endswith("not_found")
    assert len(served.hub.asked) == 1


def test_session_endpoints_manage_sessions(http: httpx2.Client, served: Running) -> None:
    http.post("/v1/chat/completions", json=chat("hello", session_id="one"))
    assert http.post("/v1/sessions/one/release").json()["tier"] == "disk"
    assert http.post("/v1/sessions/one/fork", json={"name": "two"}).json()["id"] == "two"
    assert http.post("/v1/sessions/one/fork").json()["id"] == "one again"
    assert error(http.post("/v1/sessions/one/fork", json={"name": "two"}), 409)
    for act in ("pin", "unpin", "prefetch", "compact"):
        assert http.post(f"/v1/sessions/one/{act}").json()["id"] == "one"
        assert error(http.post(f"/v1/sessions/none/{act}"), 404)["code"] == "session_not_found"
    file = http.post("/v1/sessions/one/export").content
    assert http.post("/v1/sessions/three/import", content=file).json()["turns"] == 2
    assert error(http.post("/v1/sessions/four/import", content=b"\x80\x04"), 400)
    result = http.get("/v1/sessions/one/kept").json()
    assert result["layers"] == [[[0, 8], [0, 2, 6, 8]], [[0, 2, 6, 8], [0, 8]]]
    assert result["turns"][0] == {"role": "user", "text": "hello", "start": 0, "stop": 4}


def test_tokenize_and_detokenize_round_trip(http: httpx2.Client, served: Running) -> None:
    result = http.post("/tokenize", json={"prompt": "hi"}).json()
    assert result == {"count": 2, "max_model_len": 4096, "tokens": [104, 105]}
    assert http.post("/detokenize", json={"tokens": result["tokens"]}).json() == {"prompt": "hi"}
    assert error(http.post("/detokenize", json={"tokens": [999]}), 400)["param"] == "tokens"
    assert error(http.post("/detokenize", json={"tokens": [-1]}), 400)


@pytest.mark.failure(number=31)
def test_garbage_bytes_do_not_stop_the_server(served: Running) -> None:
    """Failure test 31."""
    port = int(served.url.rpartition(":")[2])
    for garbage in (b"\x00" * 4096, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" + bytes(range(256))):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sent:
            sent.sendall(garbage)
            sent.shutdown(socket.SHUT_WR)
            sent.recv(64)
    assert httpx2.get(f"{served.url}/health").json() == {"status": "ok"}


def test_server_without_keys_refuses_remote_and_cross_origin_requests() -> None:
    """Without keys only this machine is served, and no other site's page in its browser."""
    app = create_app(FakeHub(), LoopbackAuth(), Archive(), HttpSettings())

    async def ask(client: str, **headers: str) -> int:
        transport = httpx2.ASGITransport(app, client=(client, 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as asked:
            return (await asked.get("/v1/sessions", headers=headers)).status_code

    near, far = {"host": "127.0.0.1:8000"}, {"host": "rebound.example"}
    assert asyncio.run(ask("127.0.0.1", **near)) == asyncio.run(ask("::1")) == 200
    own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    assert asyncio.run(ask("127.0.0.1", **own, **{"sec-fetch-site": "same-origin"})) == 200
    assert asyncio.run(ask("10.0.0.7")) == asyncio.run(ask("127.0.0.1", **far)) == 403
    for origin in ("https://elsewhere.example", "null", "http://localhost:3000"):
        assert asyncio.run(ask("127.0.0.1", **own | {"origin": origin})) == 403
    for site in ("same-site", "cross-site"):  # of requests without an origin: images, scripts
        assert asyncio.run(ask("127.0.0.1", **{"sec-fetch-site": site})) == 403
