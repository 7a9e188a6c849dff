"""Larder's own format: chat messages, and questions about them with their answers."""

from __future__ import annotations

from larder.core.conversation import Conversation, Question
from larder.session.files.chat_messages import read_messages
from larder.session.files.json_fields import fields_of, list_of, text_of, text_or_number_of

CHAT_WITH_QUESTIONS_SHAPE = (
    '{"messages": [{"role", "content", "date"?}], "qa": [{"question", "answer", "kind"?}]}'
)


def is_chat_with_questions(data: object) -> bool:
    """Whether `data` has messages under that name."""
    return isinstance(data, dict) and "messages" in data


def read_chat_with_questions(data: object, name: str) -> Conversation:
    """The messages as a chat, with the questions under `qa`, if any."""
    fields = fields_of(data, "the file")
    entries = list_of(fields.get("qa", []), "'qa'")
    return Conversation(
        name=name,
        messages=read_messages(fields["messages"]),
        questions=tuple(_question(entry, f"qa {n}") for n, entry in enumerate(entries, start=1)),
    )


def _question(entry: object, place: str) -> Question:
    fields = fields_of(entry, place)
    return Question(
        question=text_of(fields, "question", place),
        answer=text_or_number_of(fields, "answer", place),
        kind=text_or_number_of(fields, "kind", place),
    )
