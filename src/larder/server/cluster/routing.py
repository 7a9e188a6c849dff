"""Which replica a request goes to: the one that has answered in its session before.

All that a name says counts, apart from the number of a fork. A request that names no session goes
by how its conversation begins, and the session that it is given has a name that tells so.
"""

from __future__ import annotations

import re
from dataclasses import replace

from larder.core.session_name import root_name
from larder.server.request import Request
from larder.store.digests import key_of

LOT_DIGITS = 16
LOT = re.compile(rf"s-([0-9a-f]{{{LOT_DIGITS}}})-[0-9a-f]+$")


def key(tenant: str, name: str) -> str:
    """The key of a session and of all its forks."""
    root = root_name(name)
    lot = LOT.match(root)
    return lot[1] if lot else key_of("session", tenant, root)


def routed(request: Request) -> tuple[str, Request]:
    """The key of a request, and the request as it is sent."""
    name = request.follows or request.session
    if name is not None:
        return key(request.tenant, name), request
    lot = key_of("text", request.tenant, *_beginning(request))[:LOT_DIGITS]
    return lot, replace(request, lot=lot)


def _beginning(request: Request) -> list[str]:
    """What stays the same while a conversation goes on: up to what its user says first."""
    if request.raw_prompt is not None:
        return [request.raw_prompt]
    said: list[str] = []
    for turn in request.turns:
        said += (turn.role, turn.text)
        if turn.role == "user":
            break
    return said
