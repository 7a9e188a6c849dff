"""The server as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as BareHTTPException
from starlette.requests import ClientDisconnect

import larder
from larder.core.errors import LarderError
from larder.server.engine_client import EngineClient
from larder.server.http import (
    chat_completions,
    completions,
    conversations,
    error_responses,
    responses,
    server_info,
    sessions,
)
from larder.server.http.app_state import AppState, HttpSettings
from larder.server.http.archive import Archive
from larder.server.http.auth import Authenticator
from larder.server.http.body_budget import BodyBudget
from larder.server.http.metrics import Metrics
from larder.server.http.middleware import AccessMiddleware
from larder.server.http.streaming import CLIENT_CLOSED_REQUEST, ClientClosedRequest


def create_app(
    hub: EngineClient, door: Authenticator, archive: Archive, settings: HttpSettings
) -> FastAPI:
    """The application: every endpoint over one hub. Hub and archive are closed with it.

    Args:
        door: who may ask.
        archive: of responses and conversations.
    """

    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(hub.close)
        archive.close()

    app = FastAPI(
        title="Larder",
        version=larder.__version__,
        lifespan=living,
        docs_url=None,
        redoc_url=None,
    )
    bodies = BodyBudget(settings.body_budget_bytes)
    gauges, what = Metrics(hub), "Bytes of request bodies, and of what they are decoded to."
    gauges.add("body_bytes", what, lambda: bodies.used_bytes)
    app.state.desk = AppState(hub, archive, bodies, gauges, settings)
    for part in (chat_completions, completions, responses, conversations, sessions, server_info):
        app.include_router(part.router)
    app.add_exception_handler(LarderError, error_responses.on_larder_error)
    app.add_exception_handler(HTTPException, error_responses.on_http_error)
    app.add_exception_handler(BareHTTPException, error_responses.on_http_error)
    app.add_exception_handler(RequestValidationError, error_responses.on_validation_error)
    app.add_exception_handler(Exception, error_responses.on_unexpected_error)
    for left in (ClientClosedRequest, ClientDisconnect):  # while it is answered, and while it asks
        app.add_exception_handler(left, _client_closed)
    app.add_middleware(AccessMiddleware, door=door, bodies=bodies, settings=settings)
    return app


async def _client_closed(request: object, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
