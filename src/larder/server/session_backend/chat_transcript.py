"""What was said in a session that is held as a chat, as a chat has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from larder.core.conversation import Conversation, Message
from larder.core.errors import LarderError
from larder.engine.chat_opening import EMPTY_HISTORY
from larder.server.request import ChatMessage
from larder.server.session_state import CompletedTurn
from larder.session.transcript.chat_log import ChatLog, ChatTurn
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter


def opening_history(
    name: str, turns: Sequence[ChatMessage], prompt: Sequence[int], scribe: TokenizerAdapter
) -> tuple[Conversation, int]:
    """What was said before the first question, and how many tokens that is.

    Args:
        name: of the session that all its forks began as.
        turns: before the first answer.
        prompt: the tokens that they came to.
    """
    if len(turns) < 2:
        return EMPTY_HISTORY, 0
    messages = tuple(Message(turn.role, turn.text) for turn in turns[:-1])
    history = Conversation(name, messages)
    try:
        ids = scribe.write(history).ids
    except LarderError:  # not every template can be closed anywhere
        return EMPTY_HISTORY, 0
    return (history, len(ids)) if tuple(prompt[: len(ids)]) == ids else (EMPTY_HISTORY, 0)


def session_log(name: str, said: Sequence[CompletedTurn], scribe: TokenizerAdapter) -> ChatLog:
    """The log of finished exchanges.

    Args:
        name: as in `opening_history`.
        said: one or more.
    """
    history, skipped = opening_history(name, said[0].turns, said[0].prompt, scribe)
    return ChatLog(history, tuple(_exchanges(said, skipped)))


def _exchanges(said: Sequence[CompletedTurn], skipped: int) -> Iterator[ChatTurn]:
    for each in said:
        ids = (*each.prompt[skipped:], *each.answer)
        yield ChatTurn(each.turns[-1].text, each.text, ids)
        skipped = 0
