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
from larder.server.hub import Hub
from larder.server.tenants import Door
from larder.server.web import (
    about,
    chat,
    completions,
    conversations,
    refusing,
    responses,
    sessions,
)
from larder.server.web.archive import Archive
from larder.server.web.bodies import Bodies
from larder.server.web.desk import Desk, Settings
from larder.server.web.gauges import Gauges
from larder.server.web.guarding import Guard
from larder.server.web.hearing import CLOSED, Gone


def create_app(hub: Hub, door: Door, archive: Archive, settings: Settings) -> FastAPI:
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
    bodies = Bodies(settings.body_budget_bytes)
    gauges, what = Gauges(hub), "Bytes of request bodies, and of what they are decoded to."
    gauges.add("body_bytes", what, lambda: bodies.used_bytes)
    app.state.desk = Desk(hub, archive, bodies, gauges, settings)
    for part in (chat, completions, responses, conversations, sessions, about):
        app.include_router(part.router)
    app.add_exception_handler(LarderError, refusing.on_larder)
    app.add_exception_handler(HTTPException, refusing.on_http)
    app.add_exception_handler(BareHTTPException, refusing.on_http)
    app.add_exception_handler(RequestValidationError, refusing.on_invalid)
    app.add_exception_handler(Exception, refusing.on_anything)
    for left in (Gone, ClientDisconnect):  # while it is answered, and while it asks
        app.add_exception_handler(left, _gone)
    app.add_middleware(Guard, door=door, bodies=bodies, settings=settings)
    return app


async def _gone(request: object, error: Exception) -> Response:
    return Response(status_code=CLOSED)
