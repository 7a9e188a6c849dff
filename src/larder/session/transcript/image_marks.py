"""Marks of images in the text of a message.

A mark stands where the image stands, and names it by its SHA-256. It begins with a code point that
is no character, which texts from outside must not contain.
"""

from __future__ import annotations

import re

START, STOP = "\ufdd0", "\ufdd1"  # Unicode reserves both for use inside a program
_MARK = re.compile(f"{START}image ([0-9a-f]{{64}}){STOP}")


def image_mark(digest: str) -> str:
    """Mark of an image, as text.

    Args:
        digest: SHA-256 in hexadecimal.
    """
    return f"{START}image {digest}{STOP}"


def has_mark(text: str) -> bool:
    """True if a text contains the beginning of a mark."""
    return START in text


def image_digests(text: str) -> list[str]:
    """Digests of the images in a text, in order."""
    return _MARK.findall(text)


def split_marks(text: str) -> list[str]:
    """Texts around the images: one more than there are images."""
    return _MARK.split(text)[::2]
