"""Segments of a conversation for embedding and clustering; sentences; turns of a history.

Follows M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv 2509.17396, section 3.1, equation 4:
w = 4 utterances each, across session borders; the last segment may be shorter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import groupby

from larder.core.conversation import Conversation, Message, PromptLayout
from larder.core.errors import BadParameter
from larder.session.files.dialogue import utterance_text

_WORD = re.compile(r"\s*\S+")
SHORT_CHARACTERS = 10
LONG_CHARACTERS = 500
_CLOSERS = "\"'”’)]}*_»"
_STOP = re.compile(
    rf"(?P<line>\s*\n)|(?P<mark>[.!?…]+)[{re.escape(_CLOSERS)}]*(?=\s)|[。！？][”’」』）]*"
)
_TITLES = frozenset("mr mrs ms dr prof st vs e.g i.e cf fig eq approx jr sr mt capt gen".split())
UTTERANCES_PER_TURN = 2  # utterances, or sentences of a document, that count as one turn


class SegmentUnit(Enum):
    """Unit of the size of a segment. In the paper's ablation utterances are best.

    UTTERANCES: whole messages; sentences in long chat messages and documents.
    WORDS: words separated by white space.
    TOKENS: tokens, counted word by word, so that no word is divided.
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
    """Contiguous part of a conversation.

    Args:
        index: index among the segments.
        spans: its spans of characters, message by message, in order.
        text: text to embed: a line per utterance, without session headers, dates and captions. It
            has the name of the speaker where the source names its speakers.
    """

    index: int
    spans: tuple[MessageSpan, ...]
    text: str

    @property
    def messages(self) -> range:
        """Range of its messages; neighbors share a message that is divided between them."""
        return range(self.spans[0].message, self.spans[-1].message + 1)


@dataclass(frozen=True)
class _Atom:
    """Indivisible part of a message: its span, the text to embed, its weight in units."""

    span: MessageSpan
    text: str
    weight: int


def cut_segments(
    conversation: Conversation,
    unit: SegmentUnit = SegmentUnit.UTTERANCES,
    size: int = 4,
    count: Callable[[str], int] | None = None,
) -> tuple[Segment, ...]:
    """Divide a conversation into segments; every character of every message is in exactly one.

    In a chat, a message of more than 500 characters counts sentence by sentence. EpiCache's
    released code does so for messages of the assistant; users paste long texts too, so here it
    applies to every message. In a transcript an utterance stays whole, whatever its length, as in
    the paper. System messages have weight 0, are not embedded, and join the next segment.

    Args:
        conversation: the messages, in order.
        unit: unit of `size`.
        size: units per segment, at least 1; only a single larger unit exceeds it.
        count: number of tokens of a text, required for `SegmentUnit.TOKENS` alone.

    Raises:
        BadParameter: `size` is below 1, or `count` is missing for tokens.
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
    """Function from the text of a unit to its weight."""
    if unit is SegmentUnit.UTTERANCES:
        return lambda text: 1
    if unit is SegmentUnit.WORDS:
        return lambda text: len(text.split())
    if count is None:
        raise BadParameter(
            "segments counted in tokens need `count`, a function from text to tokens."
        )
    return cache(count)


def _atoms(
    form: PromptLayout, index: int, message: Message, unit: SegmentUnit, weigh: Callable[[str], int]
) -> Iterator[_Atom]:
    content = message.content
    utterance = message.utterance if message.utterance.strip() else content
    offset = content.find(utterance)
    if message.role == "system" or offset < 0:
        # An utterance that is not part of the content cannot be divided by spans of the content.
        weight = 0 if message.role == "system" else weigh(utterance)
        yield _Atom(MessageSpan(index, 0, len(content)), utterance, weight)
        return
    spans = _spans(utterance, form, unit)
    for start, stop in spans:
        # Text around the utterance (headers, captions) joins its first and last span.
        span = MessageSpan(
            index,
            0 if start == 0 else offset + start,
            len(content) if stop == len(utterance) else offset + stop,
        )
        yield _Atom(span, utterance[start:stop], weigh(utterance[start:stop]))


def _spans(utterance: str, form: PromptLayout, unit: SegmentUnit) -> list[tuple[int, int]]:
    """Spans of the units of one utterance, without gaps."""
    if unit is not SegmentUnit.UTTERANCES:
        stops = [word.end() for word in _WORD.finditer(utterance)][:-1]
        borders = [0, *stops, len(utterance)]
        return list(zip(borders, borders[1:], strict=False))
    is_long = form is PromptLayout.CHAT and len(utterance) > LONG_CHARACTERS
    if utterance and (is_long or form.is_document):
        return sentences(utterance)
    return [(0, len(utterance))]


def _group_atoms(atoms: list[_Atom], size: int) -> list[list[_Atom]]:
    """Group atoms in order up to `size`; atoms of weight 0 join the next one."""
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
    spans, lines, headers = [], [], []
    for message_index, group in groupby(atoms, key=lambda atom: atom.span.message):
        parts = list(group)
        spans.append(MessageSpan(message_index, parts[0].span.start, parts[-1].span.stop))
        utterance = "".join(part.text for part in parts).strip()
        (headers if messages[message_index].role == "system" else lines).append(utterance)
    return Segment(index, tuple(spans), "\n".join(lines or headers))


def sentences(text: str) -> list[tuple[int, int]]:
    """Divide a text into spans [start, stop) of a sentence each, in order, without gaps.

    White space after a sentence belongs to it. A sentence of at most `SHORT_CHARACTERS` joins the
    next one; one of more than `LONG_CHARACTERS` is divided at white space, or within a word where
    there is none.
    """
    spans = _sentence_spans(_ends(text), len(text))
    return [part for span in _join_short(text, spans) for part in _cut_long(text, *span)]


def _ends(text: str) -> list[int]:
    """Ends of sentences, white space included."""
    ends = []
    for stop in _STOP.finditer(text):
        if stop["mark"] and not _ends_sentence(text, stop.start("mark"), stop.end()):
            continue
        ends.append(_skip_space(text, stop.end()))
    return ends


def _ends_sentence(text: str, mark: int, end: int) -> bool:
    """Test whether a mark ends a sentence, not an abbreviation, initial or list number."""
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


@dataclass(frozen=True)
class HistoryTurn:
    """Turn of a history, embedded like later turns of a chat.

    Args:
        text: question and answer.
        segment_indices: segments of the conversation that share text with it.
    """

    text: str
    segment_indices: tuple[int, ...]


def history_turns(
    conversation: Conversation, segments: Sequence[Segment]
) -> tuple[HistoryTurn, ...]:
    """Divide a conversation into turns, with the segments that share text with each.

    A turn is a user message with the reply of the assistant in a chat; two utterances without the
    names of speakers, which later turns do not have either, in a transcript; two sentences in a
    document.
    """
    holders: defaultdict[int, list[tuple[int, MessageSpan]]] = defaultdict(list)
    for segment in segments:
        for span in segment.spans:
            holders[span.message].append((segment.index, span))
    turns: list[HistoryTurn] = []
    for text, spans in _turn_texts(conversation):
        indices = {
            segment_index
            for own in spans
            for segment_index, span in holders[own.message]
            if span.start < own.stop and own.start < span.stop
        }
        if indices:
            turns.append(HistoryTurn(text, tuple(sorted(indices))))
    return tuple(turns)


def _turn_texts(conversation: Conversation) -> list[tuple[str, tuple[MessageSpan, ...]]]:
    messages = conversation.messages
    if conversation.form is PromptLayout.CHAT:
        return [_joined_messages(messages, turn) for turn in _turns(messages)]
    pairs = cut_segments(conversation, SegmentUnit.UTTERANCES, UTTERANCES_PER_TURN)
    if conversation.form.is_document:
        return [(pair.text, pair.spans) for pair in pairs]
    return [_joined_messages(messages, list(pair.messages)) for pair in pairs]


def _turns(messages: Sequence[Message]) -> list[list[int]]:
    """Indices of each user message and of the assistant messages right after it."""
    turns: list[list[int]] = []
    for index, message in enumerate(messages):
        if message.role == "user":
            turns.append([index])
        elif message.role == "assistant" and turns:
            turns[-1].append(index)
    return turns


def _joined_messages(
    messages: Sequence[Message], numbers: list[int]
) -> tuple[str, tuple[MessageSpan, ...]]:
    spans = tuple(MessageSpan(number, 0, len(messages[number].content)) for number in numbers)
    return "\n".join(utterance_text(messages[number]) for number in numbers), spans
