"""Texts cut to a length in tokens, between words; a word of many letters may be cut, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# Languages without spaces have no words that could be told apart.
WORDS = re.compile(r"\s*\S{1,16}")
LETTERS_PER_TOKEN = 16
BLOCK = 256  # words counted at once


def first_of(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest beginning of at most `tokens` tokens, or nearly so."""
    pieces = WORDS.findall(text[: max(0, tokens) * LETTERS_PER_TOKEN])
    fitting = _fitting(pieces, tokens, count_tokens)
    return "".join(pieces[:fitting])


def last_of(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest end of at most `tokens` tokens, or nearly so."""
    start = max(0, len(text) - max(0, tokens) * LETTERS_PER_TOKEN)
    pieces = WORDS.findall(text[start:])[::-1]
    fitting = _fitting(pieces, tokens, count_tokens)
    return "".join(pieces[:fitting][::-1]).lstrip()


def without_middle(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The text, or if it is too long its beginning and its end, half of the tokens each."""
    if len(text) <= tokens * LETTERS_PER_TOKEN and count_tokens(text) <= tokens:
        return text
    half = (tokens - 1) // 2
    return f"{first_of(text, half, count_tokens)}\n{last_of(text, half, count_tokens)}"


def _fitting(pieces: Sequence[str], tokens: int, count_tokens: Callable[[str], int]) -> int:
    """How many pieces fit, found in steps that halve where one is too long.

    Pieces are counted apart, which may come to more than the whole, and in no known tokenizer to
    less.
    """
    fitting, step = 0, BLOCK
    while step and fitting < len(pieces):
        taken = count_tokens("".join(pieces[fitting : fitting + step]))
        if taken <= tokens:
            tokens -= taken
            fitting = min(len(pieces), fitting + step)
        else:
            step //= 2
    return fitting
