"""HTTP server on a local port over an engine client without a model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from larder.server import Archive, Authenticator, HttpSettings, ServerConfig, create_app
from server.fake_engine_client import FakeHub


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    hub: FakeHub
    url: str
    archive: Archive


@contextmanager
def running(
    door: Authenticator, settings: HttpSettings | None = None, archive: Archive | None = None
) -> Iterator[Running]:
    """Run a server on a free port until the block is left."""
    hub, kept = FakeHub(), archive or Archive()
    app = create_app(hub, door, kept, settings or HttpSettings())
    with listening(app) as url:
        yield Running(hub, url, kept)


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Run an application likewise; its address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(64)
        with listening_on(bound, app):
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def listening_on(bound: socket.socket, app: FastAPI) -> Iterator[None]:
    """Run an application on a listening socket."""
    server = uvicorn.Server(ServerConfig(app, lifespan="on", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    yield
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def connected(url: str) -> socket.socket:
    """A connection to a server."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def awaited(met: Callable[[], bool], seconds: float = 20.0) -> bool:
    """True once a condition holds; false after a number of seconds."""
    end = time.monotonic() + seconds
    while not met() and time.monotonic() < end:
        time.sleep(0.02)
    return met()
