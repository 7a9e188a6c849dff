"""Answers of a server that is starting."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection

import httpx2
import pytest
from openai import InternalServerError, OpenAI

from larder.server import (
    ApiKeyAuth,
    Archive,
    HttpSettings,
    StartupServer,
    StartupStatus,
    create_app,
)
from server.fake_engine_client import FakeHub
from server.http.conftest import ANNE, KEYS
from server.http.running_server import listening_on

CHAT = {"model": "any", "messages": [{"role": "user", "content": "Hello."}]}


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


@pytest.fixture
def status() -> StartupStatus:
    return StartupStatus()


@pytest.fixture
def startup(bound: socket.socket, status: StartupStatus) -> Iterator[StartupServer]:
    with StartupServer(bound, ApiKeyAuth(KEYS), HttpSettings(), status) as server:
        yield server


def client_of(bound: socket.socket) -> httpx2.Client:
    headers = {"authorization": f"Bearer {ANNE}"}
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    return httpx2.Client(base_url=url, headers=headers, timeout=20)


@pytest.mark.usefixtures("startup")
def test_health_is_503_with_the_stage_of_the_start(
    bound: socket.socket, status: StartupStatus
) -> None:
    with client_of(bound) as http:
        first = http.get("/health")
        assert first.status_code == 503 and first.headers["retry-after"] == "5"
        assert first.json()["status"] == "starting" and first.json()["seconds"] >= 0
        with status.stage("Measuring the model: sensitivity", "measurements") as report:
            report(1, 3)
            measuring = http.get("/health").json()
            assert measuring.pop("seconds") >= 0
            assert measuring == {
                "status": "starting",
                "stage": "Measuring the model: sensitivity",
                "done": 1,
                "total": 3,
                "unit": "measurements",
            }
        assert http.get("/health").json()["stage"] == "Starting"
        assert http.get("/live").status_code == 200


@pytest.mark.usefixtures("startup")
def test_requests_are_503_with_retry_after_in_the_form_of_their_api(
    bound: socket.socket, status: StartupStatus
) -> None:
    with client_of(bound) as http, status.stage("Loading", ""):
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["code"] == "starting"
        assert "Loading" in answer.json()["error"]["message"]
        message = http.post("/v1/messages", json=CHAT | {"max_tokens": 3})
        assert message.status_code == 503 and message.json()["type"] == "error"
        url = f"{http.base_url}/v1"
        with OpenAI(api_key=ANNE, base_url=url, max_retries=0) as client:
            with pytest.raises(InternalServerError, match="starting"):
                client.models.list()


@pytest.mark.usefixtures("startup")
def test_keys_and_body_limits_hold_during_the_start(bound: socket.socket) -> None:
    with client_of(bound) as http:
        refused = http.get("/v1/models", headers={"authorization": "Bearer sk-none-0123456789"})
        assert refused.status_code == 401
        large = http.post("/v1/chat/completions", content=b"x" * (9 << 20))
        assert large.status_code == 413


@pytest.mark.usefixtures("startup")
def test_long_bodies_are_read_before_the_answer(bound: socket.socket) -> None:
    """Else the client would find the connection reset instead of the answer."""
    headers = {"authorization": f"Bearer {ANNE}"}
    for _ in range(3):
        connection = HTTPConnection("127.0.0.1", bound.getsockname()[1], timeout=20)
        connection.request("POST", "/v1/chat/completions", b"x" * (6 << 20), headers)
        answer = connection.getresponse()
        assert answer.status == 503 and json.loads(answer.read())["error"]["code"] == "starting"
        connection.close()
    with client_of(bound) as http:
        chunks = (b"x" * (1 << 20) for _ in range(9))
        assert http.post("/v1/chat/completions", content=chunks).status_code == 413


def test_next_server_takes_over_the_socket(bound: socket.socket, startup: StartupServer) -> None:
    with client_of(bound) as http:
        assert http.get("/health").status_code == 503
        startup.close()
        app = create_app(FakeHub(), ApiKeyAuth(KEYS), Archive(), HttpSettings())
        with listening_on(bound, app):
            assert http.get("/health").json() == {"status": "ok"}
            assert http.get("/live").json() == {"status": "ok"}
            assert http.get("/v1/models").status_code == 200


def test_connections_between_the_two_servers_wait(
    bound: socket.socket, startup: StartupServer
) -> None:
    startup.close()
    with socket.create_connection(bound.getsockname()[:2], timeout=10) as waiting:
        waiting.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        app = create_app(FakeHub(), ApiKeyAuth(KEYS), Archive(), HttpSettings())
        with listening_on(bound, app):
            assert waiting.recv(100).startswith(b"HTTP/1.1 200")
