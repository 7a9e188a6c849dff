"""Texts cut to a length in tokens, between words."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable

LETTERS_PER_TOKEN = 12  # more than any text has on average, so that little is counted in vain
_BEHIND_A_WORD = re.compile(r"(?<=\S)(?=\s|$)")
_BEFORE_A_WORD = re.compile(r"(?<!\S)(?=\S)")


def first_of(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest beginning of whole words that is at most `tokens` tokens."""
    text = text[: max(0, tokens) * LETTERS_PER_TOKEN + 1]
    ends = [found.start() for found in _BEHIND_A_WORD.finditer(text)]
    fitting = bisect_right(ends, tokens, key=lambda end: count_tokens(text[:end]))
    return text[: ends[fitting - 1]] if fitting else ""


def last_of(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest end of whole words that is at most `tokens` tokens."""
    text = text[-(max(0, tokens) * LETTERS_PER_TOKEN + 1) :]
    starts = [found.start() for found in _BEFORE_A_WORD.finditer(text)][::-1]
    fitting = bisect_right(starts, tokens, key=lambda start: count_tokens(text[start:]))
    return text[starts[fitting - 1] :] if fitting else ""


def without_middle(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The text, or if it is too long its beginning and its end, half of the tokens each."""
    if len(text) <= tokens * LETTERS_PER_TOKEN and count_tokens(text) <= tokens:
        return text
    half = (tokens - 1) // 2
    return f"{first_of(text, half, count_tokens)}\n{last_of(text, half, count_tokens)}"
