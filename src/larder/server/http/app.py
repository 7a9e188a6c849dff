"""FastAPI application of the server: routers, exception handlers, middleware."""

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
from larder.server.embedder_queue import EmbedderQueue
from larder.server.engine_client import EngineClient
from larder.server.http import (
    completions,
    conversations,
    embeddings,
    error_responses,
    messages,
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
    client: EngineClient,
    authenticator: Authenticator,
    archive: Archive,
    settings: HttpSettings,
    embedder: EmbedderQueue | None = None,
) -> FastAPI:
    """Application with every endpoint over one engine client. It closes client and archive at
    shutdown.

    Args:
        authenticator: admits or rejects each request.
        archive: stored responses and conversations.
        embedder: embeds texts for `/v1/embeddings`; None refuses them.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(client.close)
        archive.close()

    app = FastAPI(
        title="Larder", version=larder.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    bodies = BodyBudget(settings.body_budget_bytes)
    metrics = Metrics(client)
    description = "Bytes of request bodies and of their decoded values."
    metrics.add("body_bytes", description, lambda: bodies.used_bytes)
    app.state.larder = AppState(client, archive, bodies, metrics, settings, embedder)
    texts = (completions, messages, responses, conversations, embeddings)
    for module in (*texts, sessions, server_info):
        app.include_router(module.router)
    app.add_exception_handler(LarderError, error_responses.on_larder_error)
    app.add_exception_handler(HTTPException, error_responses.on_http_error)
    app.add_exception_handler(BareHTTPException, error_responses.on_http_error)
    app.add_exception_handler(RequestValidationError, error_responses.on_validation_error)
    app.add_exception_handler(Exception, error_responses.on_unexpected_error)
    app.add_exception_handler(ClientClosedRequest, _client_closed)  # during the answer
    app.add_exception_handler(ClientDisconnect, _client_closed)  # during the upload
    app.add_middleware(
        AccessMiddleware, authenticator=authenticator, bodies=bodies, settings=settings
    )
    return app


async def _client_closed(request: object, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
