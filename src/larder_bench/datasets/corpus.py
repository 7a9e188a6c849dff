"""Corpora: filler text for haystacks, and dialogues to ask about.

Corpora are folders of JSON lines compressed with xz: `prose*.jsonl.xz` holds a text per line, other
files a dialogue per line with the facts of its last state.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from larder.core import InputError, Message
from larder_bench.datasets.grammar import Grammar

PASSAGE_CHARACTERS = 1500


@dataclass(frozen=True)
class Booking:
    """Fact of a dialogue: the booked thing, one slot of it, and the slots that identify it."""

    noun: str
    slot: str
    value: str
    keys: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Dialogue:
    """Short dialogue of the corpus and the facts to ask about."""

    messages: tuple[Message, ...]
    bookings: tuple[Booking, ...]


def read_prose(path: Path) -> tuple[str, ...]:
    """All texts of a compressed file.

    Raises:
        InputError: it cannot be read.
    """
    return tuple(_lines(path))


def read_dialogues(path: Path) -> tuple[Dialogue, ...]:
    """Dialogues of a compressed file with at least one booking.

    Raises:
        InputError: it cannot be read.
    """
    dialogues = (_dialogue(line) for line in _lines(path))
    return tuple(dialogue for dialogue in dialogues if dialogue.bookings)


def sentences_of_prose(texts: Sequence[str], random: Random) -> Iterator[str]:
    """Endless sentences of randomly drawn passages, without the cut ones at both ends."""
    while True:
        text = random.choice(texts)
        start = random.randrange(max(1, len(text) - PASSAGE_CHARACTERS))
        passage = text[start : start + PASSAGE_CHARACTERS].replace("\n", " ")
        yield from (f"{part}." for part in passage.split(". ")[1:-1] if part)


def sentences_of_small_talk(grammar: Grammar, random: Random) -> Iterator[str]:
    """Endless small talk between the facts of life-logs."""
    chat = [sentence for topic in grammar.topics for sentence in topic.chat]
    while True:
        yield random.choice(chat)


def _lines(path: Path) -> Iterator[Any]:
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read as JSON lines packed with xz ({error}): name another folder."
        ) from error


def _dialogue(fields: dict[str, Any]) -> Dialogue:
    return Dialogue(
        messages=tuple(Message(role, text) for role, text in fields["turns"]),
        bookings=tuple(
            Booking(
                fact["noun"],
                fact["slot"],
                fact["value"],
                tuple((slot, value) for slot, value in fact["keys"]),
            )
            for fact in fields["facts"]
        ),
    )
