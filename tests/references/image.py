"""`image`: 1 for tokens of images, 0 for text."""

from __future__ import annotations


def marks(is_image: list[bool]) -> list[float]:
    return [1.0 if flag else 0.0 for flag in is_image]
