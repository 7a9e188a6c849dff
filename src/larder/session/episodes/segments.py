"""Segments: a conversation cut into the short stretches that are embedded and clustered.

Follows M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv 2509.17396, section 3.1, equation 4:
w = 4 utterances each, running across session borders, the last segment as short as it comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import groupby

from larder.core.conversation import Conversation, Message, PromptLayout
from larder.core.errors import BadParameter
from larder.session.episodes.sentences import LONG_CHARACTERS, sentences

_WORD = re.compile(r"\s*\S+")


class SegmentUnit(Enum):
    """What a segment's size counts. The paper's ablation: utterances serve best.

    UTTERANCES: whole messages; of a long chat message and of a document, sentences.
    WORDS: what white space separates.
    TOKENS: tokens of words counted one by one, so that no word is torn.
    """

    UTTERANCES = "utterances"
    WORDS = "words"
    TOKENS = "tokens"


@dataclass(frozen=True)
class MessageSpan:
    """Characters [start, stop) of the content of one message."""

    message: int
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """A stretch of a conversation.

    Args:
        index: its place among the segments.
        pieces: the characters it holds, message by message, in order.
        text: what is embedded: a line per utterance, without session headers, dates and captions.
            Who speaks is in the utterance where the source names its speakers.
    """

    index: int
    pieces: tuple[MessageSpan, ...]
    text: str

    @property
    def messages(self) -> range:
        """The messages it touches; neighbours share a message that is cut between them."""
        return range(self.pieces[0].message, self.pieces[-1].message + 1)


@dataclass(frozen=True)
class _Atom:
    """The smallest part that is never cut: what it covers, what of it is embedded, its weight."""

    piece: MessageSpan
    said: str
    weight: int


def cut_segments(
    conversation: Conversation,
    unit: SegmentUnit = SegmentUnit.UTTERANCES,
    size: int = 4,
    count: Callable[[str], int] | None = None,
) -> tuple[Segment, ...]:
    """Cut a conversation into segments; every character of every message is in exactly one.

    In a chat, a message of more than 500 characters counts sentence by sentence. EpiCache's
    released code does so for the assistant's messages; people paste long texts too, so here it is
    every message. In a transcript an utterance stays whole, whatever its length, as in the paper.
    System messages weigh nothing, are not embedded, and join the segment of what follows them.

    Args:
        conversation: the messages, in order.
        unit: what `size` counts.
        size: units per segment, at least 1; only a single unit that is larger exceeds it.
        count: tokens of a text, needed for `Unit.TOKENS` alone.

    Raises:
        BadParameter: `size` is below 1, or tokens shall be counted and `count` is missing.
    """
    if size < 1:
        raise BadParameter(f"segment size must be at least 1, got {size}.")
    weigh = _weight_function(unit, count)
    atoms = [
        atom
        for index, message in enumerate(conversation.messages)
        for atom in _atoms(conversation.form, index, message, unit, weigh)
    ]
    groups = _group_atoms(atoms, size)
    return tuple(_segment(i, atoms, conversation.messages) for i, atoms in enumerate(groups))


def _weight_function(unit: SegmentUnit, count: Callable[[str], int] | None) -> Callable[[str], int]:
    """What a unit's text weighs."""
    if unit is SegmentUnit.UTTERANCES:
        return lambda said: 1
    if unit is SegmentUnit.WORDS:
        return lambda said: len(said.split())
    if count is None:
        raise BadParameter(
            "segments counted in tokens need `count`, a function from text to tokens."
        )
    return cache(count)


def _atoms(
    form: PromptLayout, index: int, message: Message, unit: SegmentUnit, weigh: Callable[[str], int]
) -> Iterator[_Atom]:
    content = message.content
    said = message.utterance if message.utterance.strip() else content
    offset = content.find(said)
    if message.role == "system" or offset < 0:
        # An utterance that is not part of the content cannot be cut in the content's characters.
        weight = 0 if message.role == "system" else weigh(said)
        yield _Atom(MessageSpan(index, 0, len(content)), said, weight)
        return
    spans = _spans(said, form, unit)
    for start, stop in spans:
        # What surrounds the utterance (headers, captions) goes to its first and last piece.
        piece = MessageSpan(
            index,
            0 if start == 0 else offset + start,
            len(content) if stop == len(said) else offset + stop,
        )
        yield _Atom(piece, said[start:stop], weigh(said[start:stop]))


def _spans(said: str, form: PromptLayout, unit: SegmentUnit) -> list[tuple[int, int]]:
    """The units of one utterance, as spans that leave nothing out."""
    if unit is not SegmentUnit.UTTERANCES:
        stops = [word.end() for word in _WORD.finditer(said)][:-1]
        borders = [0, *stops, len(said)]
        return list(zip(borders, borders[1:], strict=False))
    is_long = form is PromptLayout.CHAT and len(said) > LONG_CHARACTERS
    if said and (is_long or form is PromptLayout.DOCUMENT):
        return sentences(said)
    return [(0, len(said))]


def _group_atoms(atoms: list[_Atom], size: int) -> list[list[_Atom]]:
    """Group atoms in order, as many as `size` allows; weightless ones go with the next."""
    groups: list[list[_Atom]] = []
    waiting: list[_Atom] = []
    room = 0
    for atom in atoms:
        waiting.append(atom)
        if atom.weight == 0:
            continue
        if not groups or atom.weight > room:
            groups.append([])
            room = size
        groups[-1].extend(waiting)
        room -= atom.weight
        waiting = []
    if waiting:
        groups = groups or [[]]
        groups[-1].extend(waiting)
    return groups


def _segment(index: int, atoms: list[_Atom], messages: tuple[Message, ...]) -> Segment:
    pieces, lines, headers = [], [], []
    for place, group in groupby(atoms, key=lambda atom: atom.piece.message):
        parts = list(group)
        pieces.append(MessageSpan(place, parts[0].piece.start, parts[-1].piece.stop))
        said = "".join(part.said for part in parts).strip()
        (headers if messages[place].role == "system" else lines).append(said)
    return Segment(index, tuple(pieces), "\n".join(lines or headers))
