"""Sessions endpoints, `/v1/sessions`: cache residency of each session and its admin operations."""

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
    """Body of a fork request; without a name the server chooses one."""

    name: Text | None = None


@router.get("")
def list_sessions(http: HttpRequest) -> JSONResponse:
    """List the sessions of the tenant, the most recently used first."""
    views = app_state(http).client.sessions(tenant_of(http))
    return JSONResponse({"object": "list", "data": [session_json(view) for view in views]})


@router.get("/{name:path}/kept")
def kept(http: HttpRequest, name: str) -> JSONResponse:
    """Map of cached positions: those that each layer and head holds or has parked, as
    [start, stop) ranges, with episodes, turns and the text of each token. The cache does not
    move: `tier` tells whether it is only in the store."""
    client, tenant = app_state(http).client, tenant_of(http)
    positions, session = (
        client.kept(tenant, validate_session_name(name, "name")),
        client.session(tenant, name),
    )
    turns = [
        {"role": turn.role, "text": turn.text, "start": start, "stop": stop}
        for turn, (start, stop) in zip(session.turns, session.spans, strict=True)
    ]
    layers, parked = (
        [[_ranges(positions) for positions in heads] for heads in part]
        for part in (positions.layers, positions.parked)
    )
    episodes = [asdict(episode) for episode in positions.episodes]
    fields = {"tokens": positions.tokens, "layers": layers, "parked": parked, "episodes": episodes}
    fields |= {"tier": positions.tier}
    return JSONResponse({**fields, "turns": turns, "texts": list(positions.texts)})


@router.post("/{name:path}/pin")
def pin(http: HttpRequest, name: str) -> JSONResponse:
    """Pin a session: it is evicted after all that are not pinned."""
    return _apply(http, name, app_state(http).client.pin)


@router.post("/{name:path}/unpin")
def unpin(http: HttpRequest, name: str) -> JSONResponse:
    """Unpin a session."""
    return _apply(http, name, app_state(http).client.unpin)


@router.post("/{name:path}/release")
def release(http: HttpRequest, name: str) -> JSONResponse:
    """Free the memory of a session; its transcript stays."""
    return _apply(http, name, app_state(http).client.release)


@router.post("/{name:path}/prefetch")
def prefetch(http: HttpRequest, name: str) -> JSONResponse:
    """Restore a session's cache to the device."""
    return _apply(http, name, app_state(http).client.prefetch)


@router.post("/{name:path}/compact")
def compact(http: HttpRequest, name: str) -> JSONResponse:
    """Restore a session's cache to the device within its budget, and free all slack."""
    return _apply(http, name, app_state(http).client.compact)


@router.post("/{name:path}/fork")
def fork(http: HttpRequest, name: str, body: ForkRequest | None = None) -> JSONResponse:
    """Fork a session: create another one in the same state."""
    new_name = (
        None if body is None or body.name is None else validate_session_name(body.name, "name")
    )
    branch = app_state(http).client.fork(
        tenant_of(http), validate_session_name(name, "name"), new_name
    )
    return JSONResponse(session_json(branch))


@router.post("/{name:path}/export")
def export(http: HttpRequest, name: str) -> Response:
    """Export a session as a file."""
    content = app_state(http).client.export(tenant_of(http), validate_session_name(name, "name"))
    disposition = f"attachment; filename*=UTF-8''{quote(name, safe='')}.larder"
    return Response(
        content, media_type="application/octet-stream", headers={"content-disposition": disposition}
    )


@router.post("/{name:path}/import")
async def import_session(http: HttpRequest, name: str) -> JSONResponse:
    """Create a session from an exported file, which is the body."""
    content = await http.body()
    state, tenant = app_state(http), tenant_of(http)
    act = partial(state.client.import_, tenant, validate_session_name(name, "name"), content)
    return JSONResponse(session_json(await state.bodies.run_import(tenant, act)))


@router.get("/{name:path}")
def retrieve(http: HttpRequest, name: str) -> JSONResponse:
    """Retrieve a session."""
    return JSONResponse(
        session_json(
            app_state(http)
            .client.session(tenant_of(http), validate_session_name(name, "name"))
            .view
        )
    )


@router.delete("/{name:path}")
def delete(http: HttpRequest, name: str, branches: bool = False) -> JSONResponse:
    """Delete a session from every tier; with `branches=true` its branches, too.

    A branch is created by a request that shares a prefix with the session and then diverges. The
    answer names the remaining branches.
    """
    remaining = app_state(http).client.remove(
        tenant_of(http), validate_session_name(name, "name"), branches
    )
    fields = {"id": name, "object": "session.deleted", "deleted": True}
    return JSONResponse({**fields, "branches": list(remaining)})


def session_json(view: SessionInfo) -> dict[str, Any]:
    """A session as JSON."""
    fields = {**vars(view), "tier_bytes": dict(view.tier_bytes)}
    del fields["name"]
    return {"id": view.name, "object": "session", **fields}


def _apply(http: HttpRequest, name: str, act: Callable[[str, str], SessionInfo]) -> JSONResponse:
    return JSONResponse(session_json(act(tenant_of(http), validate_session_name(name, "name"))))


def _ranges(positions: tuple[int, ...]) -> list[int]:
    """Ascending positions as start, stop, start, stop, ..."""
    ranges: list[int] = []
    for position in positions:
        if ranges and ranges[-1] == position:
            ranges[-1] += 1
        else:
            ranges += (position, position + 1)
    return ranges
