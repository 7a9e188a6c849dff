"""Session named by a request, from headers and body fields, and new random ids."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from larder.server.api_errors import validate_session_name
from larder.server.http.error_responses import invalid_field

# Session headers of several kinds of clients; the first one counts.
SESSION_HEADERS = (
    "x-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
    "x-grok-conv-id",
    "x-openwebui-chat-id",
)


@dataclass(frozen=True)
class SessionHint:
    """Session name that a request gives, if any.

    Args:
        name: None if the request names no session.
        is_firm: the name identifies one conversation. A prompt cache key does not: many requests
            may carry the same one at the same time.
    """

    name: str | None
    is_firm: bool = True


def session_hint(
    headers: Mapping[str, str],
    names: Sequence[str],
    session_id: str | None,
    prompt_cache_key: str | None,
) -> SessionHint:
    """Session hint from headers and body, without `conversation` and `previous_response_id`.

    Args:
        names: headers that may name a session, in order of precedence.

    Raises:
        ApiError: 400 for an invalid name.
    """
    for name in names:
        if headers.get(name):
            return SessionHint(validate_session_name(_header_text(headers[name], name), name))
    if session_id is not None:
        return SessionHint(validate_session_name(session_id, "session_id"))
    if prompt_cache_key:
        return SessionHint(
            validate_session_name(prompt_cache_key, "prompt_cache_key"), is_firm=False
        )
    return SessionHint(None)


def new_id(kind: str) -> str:
    """Unguessable id, such as `resp_0c1f...`."""
    return f"{kind}{secrets.token_hex(16)}"


def _header_text(value: str, name: str) -> str:
    """Header value decoded as UTF-8 instead of HTTP's Latin-1.

    Raises:
        ApiError: 400: the bytes are not UTF-8.
    """
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise invalid_field(
            f"{name} must be UTF-8, got other bytes: encode it, or send session_id in the body.",
            name,
            "invalid_session_id",
        ) from error
