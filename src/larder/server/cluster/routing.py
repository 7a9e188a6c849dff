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

KEY_DIGITS = 16
GENERATED_NAME = re.compile(rf"s-([0-9a-f]{{{KEY_DIGITS}}})-[0-9a-f]+$")


def routing_key(tenant: str, name: str) -> str:
    """The key of a session and of all its forks."""
    root = root_name(name)
    lot = GENERATED_NAME.match(root)
    return lot[1] if lot else key_of("session", tenant, root)


def route(request: Request) -> tuple[str, Request]:
    """The key of a request, and the request as it is sent."""
    name = request.follows or request.session
    if name is not None:
        return routing_key(request.tenant, name), request
    lot = key_of("text", request.tenant, *_stable_prefix(request))[:KEY_DIGITS]
    return lot, replace(request, routing_tag=lot)


def _stable_prefix(request: Request) -> list[str]:
    """What stays the same while a conversation goes on: up to what its user says first."""
    if request.raw_prompt is not None:
        return [request.raw_prompt]
    said: list[str] = []
    for turn in request.turns:
        said += (turn.role, turn.text)
        if turn.role == "user":
            break
    return said
