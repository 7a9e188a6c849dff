"""Answers of a server whose model is not ready yet: 503 with what it does, on the same address."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from larder.core.progress import Progress, ProgressStage, silent_stage
from larder.server.http.app_state import HttpSettings
from larder.server.http.auth import Authenticator
from larder.server.http.body_budget import BodyBudget
from larder.server.http.connections import ServerConfig
from larder.server.http.error_responses import BodyError, error_response, on_http_error
from larder.server.http.middleware import AccessMiddleware
from larder.server.request import ApiError

RETRY_SECONDS = 5.0
# The connection ends with the answer, so that the next request finds the server that is ready.
CLOSING = {"connection": "close"}
CLOSING_SECONDS = 2  # for answers in progress when the model is ready, and for their bodies


@dataclass(frozen=True)
class Stage:
    """Stage of a start, as `/health` shows it.

    Args:
        doing: label, such as `Loading smollm2`.
        unit: of `done` and `total`; empty if nothing is counted.
    """

    doing: str
    unit: str = ""
    done: int = 0
    total: int = 0


class StartupStatus:
    """Present stage of a start. Safe from any thread.

    Args:
        shown: stages on the terminal, which see the same progress.
    """

    def __init__(self, shown: ProgressStage = silent_stage) -> None:
        self._shown, self._started = shown, monotonic()
        self._stage = Stage("Starting")

    @contextmanager
    def stage(self, doing: str, unit: str) -> Generator[Progress]:
        """`ProgressStage` that `/health` shows; the stage around it is back when it ends."""
        outer = self._stage
        with self._shown(doing, unit) as show:

            def report(done: int, total: int) -> None:
                self._stage = Stage(doing, unit, done, total)
                show(done, total)

            self._stage = Stage(doing, unit)
            try:
                yield report
            finally:
                self._stage = outer

    def document(self) -> dict[str, Any]:
        """Body of `/health` before the server is ready."""
        stage, seconds = self._stage, round(monotonic() - self._started, 1)
        document = {"status": "starting", "stage": stage.doing, "seconds": seconds}
        if stage.total:
            document |= {"done": stage.done, "total": stage.total, "unit": stage.unit}
        return document


class StartupServer:
    """HTTP server in a thread of its own that answers on a listening socket until `close`.

    `/live` is 200 and `/health` 503 with the stage of the start; all else is 503 `starting`, with
    `retry-after`, behind the same checks of keys and limits as later. Afterwards the socket still
    listens: connections that it has accepted by then wait for the next server.

    Args:
        bound: listening socket, which stays the caller's.
    """

    def __init__(
        self,
        bound: socket.socket,
        authenticator: Authenticator,
        settings: HttpSettings,
        status: StartupStatus,
    ) -> None:
        app, self._bound = _startup_app(authenticator, settings, status), bound
        config = ServerConfig(app, settings, timeout_graceful_shutdown=CLOSING_SECONDS)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="larder startup", daemon=True)

    def close(self) -> None:
        """Stop answering; no effect the second time."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> StartupServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        with self._bound.dup() as own:  # closed at the end; the caller's stays open
            asyncio.run(self._server.serve(sockets=[own]))


def _startup_app(
    authenticator: Authenticator, settings: HttpSettings, status: StartupStatus
) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/live")
    async def live() -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse({"status": "ok"}, headers=CLOSING)

    @app.get("/health")
    async def health() -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        headers = {"retry-after": f"{RETRY_SECONDS:.0f}", **CLOSING}
        return JSONResponse(status.document(), 503, headers=headers)

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "DELETE", "PUT", "PATCH"])
    async def other(http: HttpRequest) -> Response:  # pyright: ignore[reportUnusedFunction]
        await _discard_body(http)  # else the end of the connection would overtake the answer
        response = error_response(server_starting(status), http.url.path)
        response.headers.update(CLOSING)
        return response

    app.add_exception_handler(BodyError, on_http_error)
    bodies = BodyBudget(settings.body_budget_bytes)
    app.add_middleware(
        AccessMiddleware, authenticator=authenticator, bodies=bodies, settings=settings
    )
    return app


async def _discard_body(http: HttpRequest) -> None:
    """Read the rest of a request, unless it takes too long or the client leaves."""

    async def read() -> None:
        async for _ in http.stream():
            pass

    with suppress(asyncio.TimeoutError, ClientDisconnect):
        await asyncio.wait_for(read(), CLOSING_SECONDS)


def server_starting(status: StartupStatus) -> ApiError:
    """503 `starting`: the model is not ready yet."""
    stage = status.document()
    count = f", {stage['done']} of {stage['total']} {stage['unit']}" if "total" in stage else ""
    message = f"The server is starting ({stage['stage']}{count}): try again in a few seconds."
    return ApiError(message, 503, "starting", retry_after=RETRY_SECONDS)
