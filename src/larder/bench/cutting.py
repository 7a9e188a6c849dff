"""Texts cut to a length in tokens, between words; a word of many letters may be cut, too."""

from __future__ import annotations

import re
from collections.abc import Callable

# Languages without spaces have no words that could be told apart.
WORDS = re.compile(r"\s*\S{1,16}")
LETTERS_PER_TOKEN = 16
BLOCK = 256  # words counted at once


def first_of(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest beginning of at most `tokens` tokens, or nearly so."""
    pieces = WORDS.findall(text[: max(0, tokens) * LETTERS_PER_TOKEN])
    fitting = _fitting(lambda n, m: "".join(pieces[n:m]), len(pieces), tokens, count_tokens)
    return "".join(pieces[:fitting])


def last_of(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest end of at most `tokens` tokens, or nearly so."""
    start = max(0, len(text) - max(0, tokens) * LETTERS_PER_TOKEN)
    pieces = WORDS.findall(text[start:])
    last = len(pieces)
    fitting = _fitting(
        lambda n, m: "".join(pieces[last - m : last - n]), last, tokens, count_tokens
    )
    return "".join(pieces[last - fitting :]).lstrip()


def without_middle(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The text, or if it is too long its beginning and its end, half of the tokens each."""
    if len(text) <= tokens * LETTERS_PER_TOKEN and count_tokens(text) <= tokens:
        return text
    half = (tokens - 1) // 2
    return f"{first_of(text, half, count_tokens)}\n{last_of(text, half, count_tokens)}"


def _fitting(
    joined: Callable[[int, int], str], pieces: int, tokens: int, count_tokens: Callable[[str], int]
) -> int:
    """How many pieces fit, found in steps that halve where one is too long.

    Steps are counted apart, which may come to more than the whole, and in no known tokenizer to
    less.
    """
    fitting, step = 0, BLOCK
    while step and fitting < pieces:
        stop = min(pieces, fitting + step)
        taken = count_tokens(joined(fitting, stop))
        if taken <= tokens:
            tokens -= taken
            fitting = stop
        else:
            step //= 2
    return fitting
