"""What a history says in the form in which a chat's turns are filed: exchange by exchange.

A threshold for turns is only worth its quantile if it was found on texts like theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from larder.core.conversation import Conversation, Message, PromptLayout
from larder.session.files.transcript import words_of
from larder.session.segments import Piece, Segment, Unit, cut

PAIR = 2  # utterances, or sentences of a document, that stand for a question and its answer


@dataclass(frozen=True)
class PastTurn:
    """A turn, embedded as turns are when they are filed.

    Args:
        text: question and answer.
        places: the segments of the conversation that hold some of it.
    """

    text: str
    places: tuple[int, ...]


def exchanges(conversation: Conversation, segments: Sequence[Segment]) -> tuple[PastTurn, ...]:
    """Cut a conversation into exchanges and find the segments that share text with each.

    In a chat, a user's message with what the assistant replies; in a transcript, two utterances,
    without the names of who said them, which no turn of a chat carries; in a document, two
    sentences.
    """
    holders: defaultdict[int, list[tuple[int, Piece]]] = defaultdict(list)
    for segment in segments:
        for piece in segment.pieces:
            holders[piece.message].append((segment.index, piece))
    found: list[PastTurn] = []
    for text, pieces in _cut(conversation):
        places = {
            place
            for piece in pieces
            for place, held in holders[piece.message]
            if held.start < piece.stop and piece.start < held.stop
        }
        if places:
            found.append(PastTurn(text, tuple(sorted(places))))
    return tuple(found)


def _cut(conversation: Conversation) -> list[tuple[str, tuple[Piece, ...]]]:
    messages = conversation.messages
    if conversation.form is PromptLayout.CHAT:
        return [_whole(messages, turn) for turn in _turns(messages)]
    pairs = cut(conversation, Unit.UTTERANCES, PAIR)
    if conversation.form is PromptLayout.DOCUMENT:
        return [(pair.text, pair.pieces) for pair in pairs]
    return [_whole(messages, list(pair.messages)) for pair in pairs]


def _turns(messages: Sequence[Message]) -> list[list[int]]:
    """Each user's message, by number, with the assistant's messages right behind it."""
    turns: list[list[int]] = []
    for number, message in enumerate(messages):
        if message.role == "user":
            turns.append([number])
        elif message.role == "assistant" and turns:
            turns[-1].append(number)
    return turns


def _whole(messages: Sequence[Message], numbers: list[int]) -> tuple[str, tuple[Piece, ...]]:
    pieces = tuple(Piece(number, 0, len(messages[number].content)) for number in numbers)
    return "\n".join(words_of(messages[number]) for number in numbers), pieces
