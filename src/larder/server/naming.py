"""What sessions are called that nobody has named: branches bear the name of what they began as."""

from __future__ import annotations

import re

from larder.server.refusals import invalid

NAME_CHARACTERS = 255
_NUMBER = re.compile(r"~\d+$")


def root_of(name: str) -> str:
    """The name of the session that one began as; its own, where it is no branch."""
    return _NUMBER.sub("", name) or name


def branch(root: str, number: int) -> str:
    """What a branch is called."""
    return f"{root}~{number}"


def checked(name: str) -> str:
    """A name that a client gives a session.

    Raises:
        Refusal: it is none.
    """
    if not 0 < len(name) <= NAME_CHARACTERS or not name.isprintable():
        raise invalid(
            f"A session's name has 1 to {NAME_CHARACTERS} printable characters, got "
            f"{len(name)} characters: take a shorter or plainer one.",
            "session",
        )
    return name
