"""`punctuation`: signs and white space alone, with a sign among them."""

from __future__ import annotations

SIGNS = set("!\"#%&'()*,-./:;?@[\\]_{}…。！？’”“‘—–¿¡«»")  # noqa: RUF001


def contains(text: str, is_special: bool) -> bool:
    left = [sign for sign in text if not sign.isspace()]
    return bool(left) and not is_special and all(sign in SIGNS for sign in left)
