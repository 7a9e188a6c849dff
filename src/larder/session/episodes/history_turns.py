"""What a history says in the form in which a chat's turns are filed: exchange by exchange.

A threshold for turns is only worth its quantile if it was found on texts like theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from larder.core.conversation import Conversation, Message, PromptLayout
from larder.session.episodes.segments import MessageSpan, Segment, SegmentUnit, cut_segments
from larder.session.files.dialogue import utterance_text

UTTERANCES_PER_TURN = (
    2  # utterances, or sentences of a document, that stand for a question and its answer
)


@dataclass(frozen=True)
class HistoryTurn:
    """A turn, embedded as turns are when they are filed.

    Args:
        text: question and answer.
        places: the segments of the conversation that hold some of it.
    """

    text: str
    places: tuple[int, ...]


def history_turns(
    conversation: Conversation, segments: Sequence[Segment]
) -> tuple[HistoryTurn, ...]:
    """Cut a conversation into exchanges and find the segments that share text with each.

    In a chat, a user's message with what the assistant replies; in a transcript, two utterances,
    without the names of who said them, which no turn of a chat carries; in a document, two
    sentences.
    """
    holders: defaultdict[int, list[tuple[int, MessageSpan]]] = defaultdict(list)
    for segment in segments:
        for piece in segment.pieces:
            holders[piece.message].append((segment.index, piece))
    found: list[HistoryTurn] = []
    for text, pieces in _turn_texts(conversation):
        places = {
            place
            for piece in pieces
            for place, held in holders[piece.message]
            if held.start < piece.stop and piece.start < held.stop
        }
        if places:
            found.append(HistoryTurn(text, tuple(sorted(places))))
    return tuple(found)


def _turn_texts(conversation: Conversation) -> list[tuple[str, tuple[MessageSpan, ...]]]:
    messages = conversation.messages
    if conversation.form is PromptLayout.CHAT:
        return [_joined_messages(messages, turn) for turn in _turns(messages)]
    pairs = cut_segments(conversation, SegmentUnit.UTTERANCES, UTTERANCES_PER_TURN)
    if conversation.form is PromptLayout.DOCUMENT:
        return [(pair.text, pair.pieces) for pair in pairs]
    return [_joined_messages(messages, list(pair.messages)) for pair in pairs]


def _turns(messages: Sequence[Message]) -> list[list[int]]:
    """Each user's message, by number, with the assistant's messages right behind it."""
    turns: list[list[int]] = []
    for number, message in enumerate(messages):
        if message.role == "user":
            turns.append([number])
        elif message.role == "assistant" and turns:
            turns[-1].append(number)
    return turns


def _joined_messages(
    messages: Sequence[Message], numbers: list[int]
) -> tuple[str, tuple[MessageSpan, ...]]:
    pieces = tuple(MessageSpan(number, 0, len(messages[number].content)) for number in numbers)
    return "\n".join(utterance_text(messages[number]) for number in numbers), pieces
