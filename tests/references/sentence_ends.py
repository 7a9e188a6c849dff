"""`sentence_ends`: a line break anywhere, or an end mark with nothing but closing signs behind."""

from __future__ import annotations

MARKS, CLOSING = ".!?…。！？", "\"')]’”"  # noqa: RUF001


def contains(text: str, is_special: bool) -> bool:
    if is_special or "\n" in text:
        return True
    left = text.rstrip()
    while left and left[-1] in CLOSING:
        left = left[:-1]
    return bool(left) and left[-1] in MARKS
