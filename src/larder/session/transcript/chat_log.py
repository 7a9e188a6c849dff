"""What was said in a chat, token by token: all that is needed to read it again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from larder.core.conversation import Conversation, Message, PromptLayout
from larder.session.prefill import PrefillInput
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter, Transcript


@dataclass(frozen=True)
class ChatTurn:
    """A question and its answer, as said.

    Args:
        ids: the tokens of both turns as the model read them, from the header of the question's to
            the end of the answer's.
    """

    question: str
    answer: str
    ids: tuple[int, ...]

    @property
    def text(self) -> str:
        """Both as one segment, for embedding."""
        return f"{self.question}\n{self.answer}"


@dataclass(frozen=True)
class ChatLog:
    """A chat from its beginning.

    Args:
        history: what was read before the first turn; without messages where nothing was.
        exchanges: in the order they were said, whichever episode answered.
    """

    history: Conversation
    turns: tuple[ChatTurn, ...] = ()

    def with_turn(self, turn: ChatTurn) -> ChatLog:
        """The log with one more exchange."""
        return replace(self, turns=(*self.turns, turn))

    def transcript(self, scribe: TokenizerAdapter) -> Transcript:
        """The history as the model reads it."""
        return (
            scribe.encode_conversation(self.history)
            if self.history.messages
            else Transcript((), ())
        )

    def prefill_input(self, transcript: Transcript) -> PrefillInput:
        """All of it, to be read."""
        texts = tuple(exchange.text for exchange in self.turns)
        ids = tuple(token for exchange in self.turns for token in exchange.ids)
        return PrefillInput(self.history, transcript, texts, ids)


_MESSAGE = ("role", "content", "speaker", "date", "utterance")


def chat_log_record(log: ChatLog) -> dict[str, Any]:
    """A log as plain data. Questions of the history's file are not part of the chat."""
    history = log.history
    return {
        "history": {
            "name": history.name,
            "form": history.form.value,
            "opening": history.opening,
            "question_prompt": history.question_prompt,
            "messages": [
                {key: getattr(message, key) for key in _MESSAGE} for message in history.messages
            ],
        },
        "turns": [_turn_record(exchange) for exchange in log.turns],
    }


def chat_log_from_record(record: dict[str, Any]) -> ChatLog:
    """The log that `chat_log_record` wrote.

    Raises:
        KeyError, TypeError, ValueError: something is missing or of a wrong kind.
    """
    told = _object(record["history"], "history")
    history = Conversation(
        name=_text(told, "name"),
        messages=tuple(_message(each) for each in _list(told, "messages")),
        form=PromptLayout(told["form"]),
        opening=_text(told, "opening"),
        question_prompt=_text(told, "question_prompt"),
    )
    return ChatLog(history, tuple(_turn_from_record(each) for each in _list(record, "turns")))


def _turn_record(exchange: ChatTurn) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": exchange.question},
        {"role": "assistant", "content": exchange.answer},
    ]
    return {"messages": messages, "ids": list(exchange.ids)}


def _turn_from_record(value: Any) -> ChatTurn:
    turn = _object(value, "turn")
    question, answer = (_object(each, "message") for each in _list(turn, "messages"))
    ids = _list(turn, "ids")
    if not ids or any(type(token) is not int or token < 0 for token in ids):
        raise TypeError("ids")
    return ChatTurn(_text(question, "content"), _text(answer, "content"), tuple(ids))


def _message(value: Any) -> Message:
    told = _object(value, "message")
    if told["role"] not in ("system", "user", "assistant"):
        raise ValueError("role")
    return Message(**{key: _text(told, key) for key in _MESSAGE})


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(name)
    return value


def _list(fields: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(fields[key], list):
        raise TypeError(key)
    return fields[key]


def _text(fields: dict[str, Any], key: str) -> str:
    if not isinstance(fields[key], str):
        raise TypeError(key)
    return fields[key]
