"""Routing keys: requests of one session, and of its forks, go to the same replica.

The key is derived from the session's name without the number of a fork. A request without a session
is routed by the stable prefix of its conversation, and the name of its new session has that key.
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
    """Routing key of a session and of all its forks."""
    root = root_name(name)
    tag = GENERATED_NAME.match(root)
    return tag[1] if tag else key_of("session", tenant, root)


def route(request: Request) -> tuple[str, Request]:
    """Routing key of a request, and the request with its routing tag."""
    name = request.follows or request.session
    if name is not None:
        return routing_key(request.tenant, name), request
    tag = key_of("text", request.tenant, *_stable_prefix(request))[:KEY_DIGITS]
    return tag, replace(request, routing_tag=tag)


def _stable_prefix(request: Request) -> list[str]:
    """Roles and texts up to the first user message, which stay the same as a conversation grows."""
    if request.raw_prompt is not None:
        return [request.raw_prompt]
    prefix: list[str] = []
    for turn in request.turns:
        prefix += (turn.role, turn.text)
        if turn.role == "user":
            break
    return prefix
