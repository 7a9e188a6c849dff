"""`question_marks`: any sign of asking anywhere in the text of a token."""

from __future__ import annotations


def contains(text: str, is_special: bool) -> bool:
    return not is_special and any(sign in text for sign in "?\uff1f\u061f\u037e\u055e\u1367")
