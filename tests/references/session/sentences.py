"""Sentences, found by walking over the text one character at a time."""

from __future__ import annotations

CLOSERS = "\"'”’)]}*_»"
OPENERS = "\"'“‘([{*_«"
WIDE_CLOSERS = "”’」』）"
TITLES = "mr mrs ms dr prof st vs e.g i.e cf fig eq approx jr sr mt capt gen".split()


def slow_sentences(text: str, short: int, long: int) -> list[tuple[int, int]]:
    """Cut at ends, then let short ones join the next, then cut long ones at white space."""
    parts: list[str] = []
    part = ""
    for i, character in enumerate(text):
        part += character
        before_space = character.isspace() and text[i + 1 : i + 2].isspace()
        if not before_space and ends(text, i):
            parts.append(part)
            part = ""
    parts.append(part)
    joined = join(parts, short)
    spans, start = [], 0
    for each in [piece for part in joined for piece in pieces(part, long)]:
        spans.append((start, start + len(each)))
        start += len(each)
    return spans


def ends(text: str, i: int) -> bool:
    """True if a sentence ends after character i, which is the last of its white space."""
    if text[i + 1 : i + 2].isspace():
        return False
    space = i
    while space >= 0 and text[space].isspace():
        space -= 1
    if "\n" in text[space + 1 : i + 1]:
        return True
    at = space
    while at >= 0 and text[at] in WIDE_CLOSERS:
        at -= 1
    if at >= 0 and text[at] in "。！？":
        return True
    at = space
    while at >= 0 and text[at] in CLOSERS:
        at -= 1
    if space == i or at < 0 or text[at] not in ".!?…":
        return False
    return not goes_on(text, at, space, text[i + 1 : i + 2])


def goes_on(text: str, at: int, space: int, following: str) -> bool:
    """True if the marks up to `at` leave the sentence open."""
    if following.islower():
        return True
    is_single_dot = text[at] == "." and at == space and text[at - 1 : at] not in list(".!?…")
    if not is_single_dot:
        return False
    line = text[:at].split("\n")[-1]
    word = line.split(" ")[-1].lstrip(OPENERS)
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    return word.lower() in TITLES or is_initial or line.strip().isdigit()


def join(parts: list[str], short: int) -> list[str]:
    joined, held = [], ""
    for part in parts:
        held += part
        if len(held.strip()) > short:
            joined.append(held)
            held = ""
    if held and joined:
        joined[-1] += held
    elif held:
        joined.append(held)
    return joined


def pieces(part: str, long: int) -> list[str]:
    done = []
    while len(part.rstrip()) > long:
        at = long
        while at > 0 and not (part[at - 1].isspace() and part[: at - 1].strip()):
            at -= 1
        at = at or long
        done.append(part[:at])
        part = part[at:]
    return [*done, part]
