"""Which session a request names, and the ids that the server makes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from larder.server.api_errors import validate_session_name
from larder.server.http.error_responses import invalid_field

# What clients of several kinds send to say which conversation this is; the first one counts.
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
    """Which conversation a request belongs to, if it says so.

    Args:
        is_firm: the client means one conversation. A cache key is none: many requests may carry
            the same one at the same time.
    """

    name: str | None
    is_firm: bool = True


def session_hint(
    headers: Mapping[str, str],
    names: Sequence[str],
    session_id: str | None,
    prompt_cache_key: str | None,
) -> SessionHint:
    """Resolve what a request says about its session, apart from `conversation` and its like.

    Args:
        names: headers that may say it, the most telling first.

    Raises:
        Refusal: 400 for a name that is none.
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
    """A name that nobody can guess, such as `resp_0c1f...`."""
    return f"{kind}{secrets.token_hex(16)}"


def _header_text(value: str, name: str) -> str:
    """What the bytes of a header spell as UTF-8; HTTP itself reads each byte as a character.

    Raises:
        Refusal: 400: they are no UTF-8.
    """
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise invalid_field(
            f"{name} must be UTF-8, got other bytes: encode it so, or send session_id in the body.",
            name,
            "invalid_session_id",
        ) from error
