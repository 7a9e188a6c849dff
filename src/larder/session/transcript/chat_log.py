"""Chat log: history and turns of a chat with their token ids, enough to prefill it again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from larder.core.conversation import Conversation, Message, PromptLayout
from larder.session.prefill import PrefillInput
from larder.session.transcript.tokenizer_adapter import TokenizedTranscript, TokenizerAdapter

_MESSAGE = ("role", "content", "speaker", "date", "utterance")


@dataclass(frozen=True)
class ChatTurn:
    """Turn of a chat: question, answer and their token ids.

    Args:
        ids: token ids of both messages as the model read them, from the header of the question to
            the end of turn of the answer.
    """

    question: str
    answer: str
    ids: tuple[int, ...]

    @property
    def text(self) -> str:
        """Question and answer as one segment, for embedding."""
        return f"{self.question}\n{self.answer}"


@dataclass(frozen=True)
class ChatLog:
    """A chat from its beginning.

    Args:
        history: conversation before the first turn; empty for a chat without one.
        turns: turns in order, whichever episode answered.
    """

    history: Conversation
    turns: tuple[ChatTurn, ...] = ()

    def with_turn(self, turn: ChatTurn) -> ChatLog:
        """Log with one more turn."""
        return replace(self, turns=(*self.turns, turn))

    def transcript(self, tokenizer: TokenizerAdapter) -> TokenizedTranscript:
        """Token ids of the history."""
        return (
            tokenizer.encode_conversation(self.history)
            if self.history.messages
            else TokenizedTranscript((), ())
        )

    def prefill_input(self, transcript: TokenizedTranscript) -> PrefillInput:
        """History and turns as input of a prefill."""
        texts = tuple(turn.text for turn in self.turns)
        ids = tuple(token for turn in self.turns for token in turn.ids)
        lens = tuple(len(turn.ids) for turn in self.turns)
        return PrefillInput(self.history, transcript, texts, ids, lens)


def chat_log_record(log: ChatLog) -> dict[str, Any]:
    """JSON record of a log, without the questions of the history."""
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
        "turns": [_turn_record(turn) for turn in log.turns],
    }


def chat_log_from_record(record: dict[str, Any]) -> ChatLog:
    """Restore a log from a record of `chat_log_record`.

    Raises:
        KeyError, TypeError, ValueError: a field is missing or has a wrong type.
    """
    fields = _object(record["history"], "history")
    history = Conversation(
        name=_text(fields, "name"),
        messages=tuple(_message(each) for each in _list(fields, "messages")),
        form=PromptLayout(fields["form"]),
        opening=_text(fields, "opening"),
        question_prompt=_text(fields, "question_prompt"),
    )
    return ChatLog(history, tuple(_turn_from_record(each) for each in _list(record, "turns")))


def _turn_record(turn: ChatTurn) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": turn.question},
        {"role": "assistant", "content": turn.answer},
    ]
    return {"messages": messages, "ids": list(turn.ids)}


def _turn_from_record(value: Any) -> ChatTurn:
    turn = _object(value, "turn")
    question, answer = (_object(each, "message") for each in _list(turn, "messages"))
    ids = _list(turn, "ids")
    if not ids or any(type(token) is not int or token < 0 for token in ids):
        raise TypeError("ids")
    return ChatTurn(_text(question, "content"), _text(answer, "content"), tuple(ids))


def _message(value: Any) -> Message:
    fields = _object(value, "message")
    if fields["role"] not in ("system", "user", "assistant"):
        raise ValueError("role")
    return Message(**{key: _text(fields, key) for key in _MESSAGE})


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
