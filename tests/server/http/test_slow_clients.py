"""Clients that send their requests slowly, beside other clients."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx2
import pytest

from larder.server import ApiKeyAuth, HttpSettings
from server.fake_engine_client import NAME
from server.http.conftest import BOB, KEYS
from server.http.running_server import Running, awaited, connected, running

MIB = 1 << 20
KEYED = f"Authorization: Bearer {BOB}\r\n"


def is_open(connection: socket.socket) -> bool:
    """True while the server has not closed a connection."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            continue
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@contextmanager
def slow_requests(url: str, count: int, sent: str) -> Iterator[list[socket.socket]]:
    """Connections whose requests never end."""
    with ExitStack() as all_of_them:
        made = [all_of_them.enter_context(connected(url)) for _ in range(count)]
        for each in made:
            each.sendall(sent.encode())
        yield made


@pytest.mark.failure(number=31)
def test_endless_header_closes_the_connection(served: Running) -> None:
    """Before: httptools, where it is installed, took all of it, and answered nobody meanwhile."""
    sent = 0
    with connected(served.url) as endless, pytest.raises(OSError):
        endless.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-A: ")
        while sent < 32 * MIB:
            endless.sendall(b"a" * 65536)
            sent += 65536
    assert sent < 32 * MIB
    assert httpx2.get(f"{served.url}/health").status_code == 200


@pytest.mark.failure(number=31)
def test_request_with_a_thousand_headers_is_refused(served: Running) -> None:
    many = {f"x-{number}": "a" for number in range(1000)}
    reply = httpx2.get(f"{served.url}/health", headers=many)
    assert reply.status_code == 431 and "more than 128 headers" in reply.json()["error"]["message"]


@pytest.mark.failure(number=31)
@pytest.mark.extended
@pytest.mark.parametrize(
    "sent",
    [
        "",
        "GET /health HTTP/1.1\r\nX-A: ",
        f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{KEYED}Content-Length: 50\r\n\r\n{{",
    ],
    ids=["nothing", "head", "body"],
)
def test_many_slow_requests_are_closed(sent: str) -> None:
    settings = HttpSettings(request_seconds=0.3)
    with (
        running(ApiKeyAuth(KEYS), settings) as served,
        slow_requests(served.url, 150, sent) as slow,
    ):
        assert httpx2.get(f"{served.url}/health", timeout=20).status_code == 200

        def none_is_open() -> bool:
            for each in slow:
                try:
                    each.send(b"a" if sent else b"")  # a byte now and then buys no time
                except OSError:
                    pass
            return not any(map(is_open, slow))

        assert awaited(none_is_open)


@pytest.mark.extended
def test_steady_body_and_long_answer_are_not_timed_out() -> None:
    settings = HttpSettings(request_seconds=0.1, request_bytes_per_second=100, ping_seconds=0.05)
    body = b'{"prompt": "' + b"a" * 3000 + b'"}'
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{KEYED}Content-Type: application/json\r\n"
    )
    with running(ApiKeyAuth(KEYS), settings) as served, connected(served.url) as steady:
        steady.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:2000])
        time.sleep(0.3)  # longer than it has for nothing, not for 2,000 bytes at that rate
        steady.sendall(body[2000:])
        assert steady.recv(64).startswith(b"HTTP/1.1 200 OK")
        request = {"model": NAME, "stream": True, "messages": [{"role": "user", "content": "wait"}]}
        path, keyed = f"{served.url}/v1/chat/completions", {"authorization": f"Bearer {BOB}"}
        with httpx2.stream("POST", path, json=request, headers=keyed, timeout=20) as reply:
            lines = reply.iter_lines()
            assert sum(next(lines) == ": ping" for _ in range(10)) >= 4


@pytest.mark.failure(number=31)
def test_slow_requests_take_at_most_half_of_the_connections() -> None:
    settings = HttpSettings(request_seconds=60.0, max_connections=16)
    with running(ApiKeyAuth(KEYS), settings) as served:
        with slow_requests(served.url, 30, "GET /health HTTP/1.1\r\nX-A: ") as slow:
            assert awaited(lambda: sum(map(is_open, slow)) <= 8)
            assert httpx2.get(f"{served.url}/health", timeout=20).status_code == 200
