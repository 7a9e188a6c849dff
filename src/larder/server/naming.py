"""What sessions are called that nobody has named: branches bear the name of what they began as."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"~\d+$")


def root_of(name: str) -> str:
    """The name of the session that one began as; its own, where it is no branch."""
    return _NUMBER.sub("", name) or name


def branch(root: str, number: int) -> str:
    """What a branch is called."""
    return f"{root}~{number}"
