"""Names: those that clients give their conversations, and those that we give."""

from __future__ import annotations

import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from larder.server.web.refusing import invalid

LONGEST = 255
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
class Hint:
    """Which conversation a request belongs to, if it says so.

    Args:
        is_firm: the client means one conversation. A cache key is none: many requests may carry
            the same one at the same time.
    """

    name: str | None
    is_firm: bool = True


def hint(
    headers: Mapping[str, str],
    names: Sequence[str],
    session_id: str | None,
    prompt_cache_key: str | None,
) -> Hint:
    """Resolve what a request says about its session, apart from `conversation` and its like.

    Args:
        names: headers that may say it, the most telling first.

    Raises:
        Refusal: 400 for a name that is none.
    """
    for name in names:
        if headers.get(name):
            return Hint(checked(headers[name], name))
    if session_id is not None:
        return Hint(checked(session_id, "session_id"))
    if prompt_cache_key:
        return Hint(checked(prompt_cache_key, "prompt_cache_key"), is_firm=False)
    return Hint(None)


def checked(name: str, param: str) -> str:
    """The name itself.

    Raises:
        Refusal: 400: it is blank, longer than 255 characters, or holds control characters.
    """
    is_plain = all(unicodedata.category(sign) not in ("Cc", "Cs") for sign in name)
    if not name.strip() or len(name) > LONGEST or not is_plain:
        raise invalid(
            f"{param} must be 1 to {LONGEST} characters without control characters, "
            f"got {len(name)}: take a shorter or plainer one.",
            param,
            "invalid_session_id",
        )
    return name


def new_id(kind: str) -> str:
    """A name that nobody can guess, such as `resp_0c1f...`."""
    return f"{kind}{secrets.token_hex(16)}"
