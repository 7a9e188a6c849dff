"""Sentences of a long text, as character spans that leave nothing out.

A line break ends a sentence, so no sentence crosses a paragraph. EpiCache's released code splits at
`.`, `!` and `?`, loses the marks and drops what is 10 characters or shorter; here every character
stays, and what is short joins its neighbour.
"""

from __future__ import annotations

import re

SHORT_CHARACTERS = 10
LONG_CHARACTERS = 500

_CLOSERS = "\"'”’)]}*_»"
_STOP = re.compile(
    rf"(?P<line>\s*\n)|(?P<mark>[.!?…]+)[{re.escape(_CLOSERS)}]*(?=\s)|[。！？][”’」』）]*"
)
_TITLES = frozenset("mr mrs ms dr prof st vs e.g i.e cf fig eq approx jr sr mt capt gen".split())


def sentences(text: str) -> list[tuple[int, int]]:
    """Cut a text into spans [start, stop) of a sentence each, in order, without gaps.

    White space after a sentence belongs to it. A sentence of at most `SHORT_CHARACTERS` joins the
    next one; one of more than `LONG_CHARACTERS` is cut at white space, or hard where there is none.
    """
    spans = _sentence_spans(_ends(text), len(text))
    return [part for span in _join_short(text, spans) for part in _cut_long(text, *span)]


def _ends(text: str) -> list[int]:
    """Where sentences end, white space included."""
    ends = []
    for stop in _STOP.finditer(text):
        if stop["mark"] and not _ends_sentence(text, stop.start("mark"), stop.end()):
            continue
        ends.append(_skip_space(text, stop.end()))
    return ends


def _ends_sentence(text: str, mark: int, end: int) -> bool:
    """Whether the marks at `mark` end a sentence, not an abbreviation, initial or list number."""
    following = text[_skip_space(text, end) :][:1]
    if following.islower():
        return False
    if text[mark:end] != ".":
        return True
    line = text[text.rfind("\n", 0, mark) + 1 : mark]
    word = line.split(" ")[-1].lstrip("\"'“‘([{*_«")
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    return not (word.lower() in _TITLES or is_initial or line.strip().isdigit())


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _sentence_spans(ends: list[int], length: int) -> list[tuple[int, int]]:
    borders = sorted({0, length, *ends})
    return list(zip(borders, borders[1:], strict=False))


def _join_short(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    start = 0
    for _, stop in spans:
        if len(text[start:stop].strip()) > SHORT_CHARACTERS:
            joined.append((start, stop))
            start = stop
    if start < len(text):
        first = joined.pop()[0] if joined else start
        joined.append((first, len(text)))
    return joined


def _cut_long(text: str, start: int, stop: int) -> list[tuple[int, int]]:
    parts = []
    while len(text[start:stop].rstrip()) > LONG_CHARACTERS:
        window = text[start : start + LONG_CHARACTERS]
        first = len(window) - len(window.lstrip())
        spaces = [i for i, character in enumerate(window) if character.isspace() and i > first]
        cut = start + (spaces[-1] + 1 if spaces else LONG_CHARACTERS)
        parts.append((start, cut))
        start = cut
    return [*parts, (start, stop)]
