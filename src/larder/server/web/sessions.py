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

from larder.server.hub import SessionView
from larder.server.refusals import checked_name
from larder.server.web.asking import Text
from larder.server.web.desk import desk_of, tenant_of
from larder.server.web.json_route import JsonRoute
from larder.server.web.shapes import Body

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=JsonRoute)


class ForkAsked(Body):
    """How the other session is to be called; None leaves it to the server."""

    name: Text | None = None


@router.get("")
def list_sessions(http: HttpRequest) -> JSONResponse:
    """List the sessions of who asks, the one that was used last first."""
    views = desk_of(http).hub.sessions(tenant_of(http))
    return JSONResponse({"object": "list", "data": [shown(view) for view in views]})


@router.get("/{name:path}/kept")
def kept(http: HttpRequest, name: str) -> JSONResponse:
    """Tell which positions each layer and head still holds, and which it has parked, as
    [start, stop) ranges, the episodes, what was said, and the text of each token. Nothing moves by
    that: of a cache that is in the store alone, its tier says so."""
    hub, tenant = desk_of(http).hub, tenant_of(http)
    held, session = hub.kept(tenant, checked_name(name, "name")), hub.session(tenant, name)
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
    return _done(http, name, desk_of(http).hub.pin)


@router.post("/{name:path}/unpin")
def unpin(http: HttpRequest, name: str) -> JSONResponse:
    """Take that back."""
    return _done(http, name, desk_of(http).hub.unpin)


@router.post("/{name:path}/release")
def release(http: HttpRequest, name: str) -> JSONResponse:
    """Give the memory of a session back; the conversation stays."""
    return _done(http, name, desk_of(http).hub.release)


@router.post("/{name:path}/prefetch")
def prefetch(http: HttpRequest, name: str) -> JSONResponse:
    """Bring a session's cache to the device."""
    return _done(http, name, desk_of(http).hub.prefetch)


@router.post("/{name:path}/compact")
def compact(http: HttpRequest, name: str) -> JSONResponse:
    """Bring a session's cache to the device, within its budget, and give all slack back."""
    return _done(http, name, desk_of(http).hub.compact)


@router.post("/{name:path}/fork")
def fork(http: HttpRequest, name: str, asked: ForkAsked | None = None) -> JSONResponse:
    """Make another session in the same state."""
    new_name = None if asked is None or asked.name is None else checked_name(asked.name, "name")
    made = desk_of(http).hub.fork(tenant_of(http), checked_name(name, "name"), new_name)
    return JSONResponse(shown(made))


@router.post("/{name:path}/export")
def export(http: HttpRequest, name: str) -> Response:
    """The session as a file."""
    content = desk_of(http).hub.export(tenant_of(http), checked_name(name, "name"))
    named = f"attachment; filename*=UTF-8''{quote(name, safe='')}.larder"
    return Response(
        content, media_type="application/octet-stream", headers={"content-disposition": named}
    )


@router.post("/{name:path}/import")
async def take_in(http: HttpRequest, name: str) -> JSONResponse:
    """Make a session of an exported file, which is the body."""
    content = await http.body()
    desk, tenant = desk_of(http), tenant_of(http)
    act = partial(desk.hub.import_, tenant, checked_name(name, "name"), content)
    return JSONResponse(shown(await desk.bodies.take_in(tenant, act)))


@router.get("/{name:path}")
def retrieve(http: HttpRequest, name: str) -> JSONResponse:
    """Tell of a session."""
    return JSONResponse(
        shown(desk_of(http).hub.session(tenant_of(http), checked_name(name, "name")).view)
    )


@router.delete("/{name:path}")
def delete(http: HttpRequest, name: str, branches: bool = False) -> JSONResponse:
    """Forget a session, in every tier; with `branches=true` its branches, too.

    A branch came about when a request began as the session does and went on otherwise. Those that
    stay are named.
    """
    staying = desk_of(http).hub.remove(tenant_of(http), checked_name(name, "name"), branches)
    told = {"id": name, "object": "session.deleted", "deleted": True}
    return JSONResponse({**told, "branches": list(staying)})


def shown(view: SessionView) -> dict[str, Any]:
    """A session as JSON."""
    told = {**vars(view), "tier_bytes": dict(view.tier_bytes)}
    del told["name"]
    return {"id": view.name, "object": "session", **told}


def _done(http: HttpRequest, name: str, act: Callable[[str, str], SessionView]) -> JSONResponse:
    return JSONResponse(shown(act(tenant_of(http), checked_name(name, "name"))))


def _ranges(positions: tuple[int, ...]) -> list[int]:
    """Ascending positions as start, stop, start, stop, ..."""
    found: list[int] = []
    for position in positions:
        if found and found[-1] == position:
            found[-1] += 1
        else:
            found += (position, position + 1)
    return found
