"""`blank_lines`: two line breaks with nothing but spaces between them; or a special token."""

from __future__ import annotations


def contains(text: str, is_special: bool) -> bool:
    lines = text.split("\n")
    return is_special or any(not line.strip(" \t\r") for line in lines[1:-1])
