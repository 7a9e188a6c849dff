"""Session names: validation, and names of branches.

One rule for all inputs: HTTP bodies, paths and headers, commands, imported files, the store.
Names are compared by code point and never normalized, so allowed names must be visually distinct:
no control characters, no invisible ones, one kind of narrow space. The rule is a list of code point
ranges, not a lookup of Unicode categories, so that every Python version of a cluster agrees.
"""

from __future__ import annotations

import re

from larder.core.errors import InputError

MAX_CHARACTERS = 255  # of a name, without branch numbers
RESERVED = (".", "..")  # path segments that clients resolve before the request
# Ends of paths that the server has below a session's own, such as /v1/sessions/NAME/kept, under a
# method of its own. `http/sessions.py` accepts no operation whose end is missing here.
RESERVED_ENDS = ("/kept",)
_SHOWN = 40

_NUMBER = re.compile(r"~[1-9][0-9]{0,8}$")
_NUMBERS = re.compile(r"(?:~[1-9][0-9]{0,8})+$")
_JOINERS = "\u200c\u200d"
_SELECTORS = "\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"
_VIRAMAS = "\u094d\u09cd\u0a4d\u0acd\u0b4d\u0bcd\u0c4d\u0ccd\u0d4d\u0dca"
_LETTER = rf"[^\x00-\x7f\s{_JOINERS}]"  # beyond ASCII, where characters join
# Invisible characters that change visible text: in emoji, Persian, Indic scripts, keycaps, and the
# flags of England, Scotland and Wales.
_VISIBLE = re.compile(
    rf"(?<={_LETTER})[{_SELECTORS}]"
    rf"|(?<=[0-9#*])\ufe0f(?=\u20e3)"
    rf"|(?<={_LETTER})[{_JOINERS}](?={_LETTER})"
    rf"|(?<=[{_VIRAMAS}])[{_JOINERS}]"
    r"|(?<=\U0001f3f4)[\U000e0030-\U000e0039\U000e0061-\U000e007a]{1,6}\U000e007f"
)
_REFUSED = re.compile(
    r"[\x00-\x1f\x7f-\x9f\ud800-\udfff"  # control characters, halves of surrogate pairs
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # text direction
    r"\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f"  # spaces and line ends
    r"\xad\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b\u2060-\u2065\u206a-\u206f\u2800\u3164\ufeff"
    r"\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    rf"{_JOINERS}{_SELECTORS}"  # invisible characters
    r"\ue000-\uf8ff\ufdd0-\ufdef\ufffc-\uffff\U000f0000-\U0010ffff"  # private use and noncharacters
    + "".join(f"{chr(plane << 16 | 0xFFFE)}{chr(plane << 16 | 0xFFFF)}" for plane in range(1, 15))
    + "]"
)


def check_session_name(name: str, label: str = "A session's name") -> None:
    """Validate a session name.

    The root and all branches of a valid name are valid.

    Args:
        label: name of the argument, for the error.

    Raises:
        InputError: the name is empty, too long, reserved, begins or ends with a space, or holds a
            control or invisible character, or a space other than U+0020 and U+3000.
    """
    root = _NUMBERS.sub("", name) or name
    count = len(root_name(name))
    if not 0 < count <= MAX_CHARACTERS:
        raise InputError(
            f"{label} must have 1 to {MAX_CHARACTERS} characters, got {count}: take a shorter one."
            if count
            else f"{label} must have 1 to {MAX_CHARACTERS} characters, got none: give it one."
        )
    invalid = _REFUSED.search(_VISIBLE.sub("", name))
    if invalid:
        raise InputError(
            f"{label} must not hold control characters, invisible characters or spaces other than "
            f"U+0020 and U+3000, got U+{ord(invalid[0]):04X} in {_shown(name)}: leave it out."
        )
    if any(each.strip() != each for each in (name, root)):
        raise InputError(
            f"{label} must not begin or end with a space, got {_shown(name)}: leave the space out."
        )
    if root in RESERVED or any(each.endswith(RESERVED_ENDS) for each in (name, root)):
        raise InputError(
            f"{label} must not be {' or '.join(map(repr, RESERVED))} nor end with "
            f"{' or '.join(map(repr, RESERVED_ENDS))}, which are paths of the server, "
            f"got {_shown(name)}: take another one."
        )


def root_name(name: str) -> str:
    """Name of the root session of a branch; the name itself for a root."""
    return _NUMBER.sub("", name) or name


def branch_name(root: str, number: int) -> str:
    """Name of a branch: its root, a tilde and its number."""
    return f"{root}~{number}"


def _shown(name: str) -> str:
    return ascii(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}...")
