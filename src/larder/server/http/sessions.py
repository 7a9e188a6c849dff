"""`/v1/sessions`: what the server holds of each conversation, and what to do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from larder.server.api_errors import validate_session_name
from larder.server.engine_client import SessionInfo
from larder.server.http.app_state import app_state, tenant_of
from larder.server.http.json_body import JsonBody
from larder.server.http.json_route import JsonRoute
from larder.server.http.protocol import Text

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=JsonRoute)


class ForkRequest(JsonBody):
    """How the other session is to be called; None leaves it to the server."""

    name: Text | None = None


@router.get("")
def list_sessions(http: HttpRequest) -> JSONResponse:
    """List the sessions of who asks, the one that was used last first."""
    views = app_state(http).hub.sessions(tenant_of(http))
    return JSONResponse({"object": "list", "data": [session_json(view) for view in views]})


@router.get("/{name:path}/kept")
def kept(http: HttpRequest, name: str) -> JSONResponse:
    """Tell which positions each layer and head still holds, and which it has parked, as
    [start, stop) ranges, the episodes, what was said, and the text of each token. Nothing moves by
    that: of a cache that is in the store alone, its tier says so."""
    hub, tenant = app_state(http).hub, tenant_of(http)
    held, session = hub.kept(tenant, validate_session_name(name, "name")), hub.session(tenant, name)
    turns = [
        {"role": turn.role, "text": turn.text, "start": start, "stop": stop}
        for turn, (start, stop) in zip(session.turns, session.spans, strict=True)
    ]
    layers, parked = (
        [[_ranges(positions) for positions in heads] for heads in part]
        for part in (held.layers, held.parked)
    )
    episodes = [asdict(episode) for episode in held.episodes]
    told = {"tokens": held.tokens, "layers": layers, "parked": parked, "episodes": episodes}
    told |= {"tier": held.tier}
    return JSONResponse({**told, "turns": turns, "texts": list(held.texts)})


@router.post("/{name:path}/pin")
def pin(http: HttpRequest, name: str) -> JSONResponse:
    """Have a session parked after all that are not pinned."""
    return _apply(http, name, app_state(http).hub.pin)


@router.post("/{name:path}/unpin")
def unpin(http: HttpRequest, name: str) -> JSONResponse:
    """Take that back."""
    return _apply(http, name, app_state(http).hub.unpin)


@router.post("/{name:path}/release")
def release(http: HttpRequest, name: str) -> JSONResponse:
    """Give the memory of a session back; the conversation stays."""
    return _apply(http, name, app_state(http).hub.release)


@router.post("/{name:path}/prefetch")
def prefetch(http: HttpRequest, name: str) -> JSONResponse:
    """Bring a session's cache to the device."""
    return _apply(http, name, app_state(http).hub.prefetch)


@router.post("/{name:path}/compact")
def compact(http: HttpRequest, name: str) -> JSONResponse:
    """Bring a session's cache to the device, within its budget, and give all slack back."""
    return _apply(http, name, app_state(http).hub.compact)


@router.post("/{name:path}/fork")
def fork(http: HttpRequest, name: str, asked: ForkRequest | None = None) -> JSONResponse:
    """Make another session in the same state."""
    new_name = (
        None if asked is None or asked.name is None else validate_session_name(asked.name, "name")
    )
    made = app_state(http).hub.fork(tenant_of(http), validate_session_name(name, "name"), new_name)
    return JSONResponse(session_json(made))


@router.post("/{name:path}/export")
def export(http: HttpRequest, name: str) -> Response:
    """The session as a file."""
    content = app_state(http).hub.export(tenant_of(http), validate_session_name(name, "name"))
    named = f"attachment; filename*=UTF-8''{quote(name, safe='')}.larder"
    return Response(
        content, media_type="application/octet-stream", headers={"content-disposition": named}
    )


@router.post("/{name:path}/import")
async def import_session(http: HttpRequest, name: str) -> JSONResponse:
    """Make a session of an exported file, which is the body."""
    content = await http.body()
    desk, tenant = app_state(http), tenant_of(http)
    act = partial(desk.hub.import_, tenant, validate_session_name(name, "name"), content)
    return JSONResponse(session_json(await desk.bodies.take_in(tenant, act)))


@router.get("/{name:path}")
def retrieve(http: HttpRequest, name: str) -> JSONResponse:
    """Tell of a session."""
    return JSONResponse(
        session_json(
            app_state(http).hub.session(tenant_of(http), validate_session_name(name, "name")).view
        )
    )


@router.delete("/{name:path}")
def delete(http: HttpRequest, name: str, branches: bool = False) -> JSONResponse:
    """Forget a session, in every tier; with `branches=true` its branches, too.

    A branch came about when a request began as the session does and went on otherwise. Those that
    stay are named.
    """
    staying = app_state(http).hub.remove(
        tenant_of(http), validate_session_name(name, "name"), branches
    )
    told = {"id": name, "object": "session.deleted", "deleted": True}
    return JSONResponse({**told, "branches": list(staying)})


def session_json(view: SessionInfo) -> dict[str, Any]:
    """A session as JSON."""
    told = {**vars(view), "tier_bytes": dict(view.tier_bytes)}
    del told["name"]
    return {"id": view.name, "object": "session", **told}


def _apply(http: HttpRequest, name: str, act: Callable[[str, str], SessionInfo]) -> JSONResponse:
    return JSONResponse(session_json(act(tenant_of(http), validate_session_name(name, "name"))))


def _ranges(positions: tuple[int, ...]) -> list[int]:
    """Ascending positions as start, stop, start, stop, ..."""
    found: list[int] = []
    for position in positions:
        if found and found[-1] == position:
            found[-1] += 1
        else:
            found += (position, position + 1)
    return found
