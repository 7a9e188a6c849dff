"""Reader of JSON chat messages, with or without questions."""

from __future__ import annotations

from larder.core.conversation import Conversation, Message, Question
from larder.core.errors import InputError
from larder.session.files.json_fields import fields_of, list_of, text_of, text_or_number_of

CHAT_MESSAGES_SHAPE = 'a list of messages [{"role", "content", "date"?}, ...]'
ROLES = ("system", "user", "assistant")
CHAT_WITH_QUESTIONS_SHAPE = (
    '{"messages": [{"role", "content", "date"?}], "qa": [{"question", "answer", "kind"?}]}'
)


def is_chat_messages(data: object) -> bool:
    """Test for the format: any list, so that errors name the malformed message."""
    return isinstance(data, list)


def read_chat_messages(data: object, name: str) -> Conversation:
    """Read a list of messages as a chat without questions."""
    return Conversation(name=name, messages=read_messages(data))


def read_messages(data: object) -> tuple[Message, ...]:
    """Read the messages of a list, in order.

    The model sees a date where it changes, on a line before a message that is not the assistant's:
    a model that reads dates in its own turns continues to write them. `utterance` is the text
    alone.
    """
    messages: list[Message] = []
    shown = ""
    for number, entry in enumerate(list_of(data, "'messages'"), start=1):
        message = _message(entry, f"message {number}")
        if message.date and message.date != shown and message.role != "assistant":
            shown = message.date
            message = _message_with_date(message)
        messages.append(message)
    if not messages:
        raise InputError("the list of messages is empty: give it at least one message.")
    return tuple(messages)


def _message(entry: object, location: str) -> Message:
    fields = fields_of(entry, location)
    if "conversation" in fields:
        raise InputError(f"{location} is a whole LoCoMo sample: write each sample to its own file.")
    role = text_of(fields, "role", location)
    if role not in ROLES:
        raise InputError(f"{location}: unknown role {role!r}; a role is one of {', '.join(ROLES)}.")
    content = text_of(fields, "content", location)
    return Message(role, content, date=text_or_number_of(fields, "date", location))


def _message_with_date(message: Message) -> Message:
    content = f"[{message.date}]\n{message.content}"
    return Message(message.role, content, date=message.date, utterance=message.content)


def is_chat_with_questions(data: object) -> bool:
    """Test for the format: an object with `messages`."""
    return isinstance(data, dict) and "messages" in data


def read_chat_with_questions(data: object, name: str) -> Conversation:
    """Read messages as a chat, with the questions under `qa`, if any."""
    fields = fields_of(data, "the file")
    entries = list_of(fields.get("qa", []), "'qa'")
    return Conversation(
        name=name,
        messages=read_messages(fields["messages"]),
        questions=tuple(_question(entry, f"qa {n}") for n, entry in enumerate(entries, start=1)),
    )


def _question(entry: object, location: str) -> Question:
    fields = fields_of(entry, location)
    return Question(
        question=text_of(fields, "question", location),
        answer=text_or_number_of(fields, "answer", location),
        kind=text_or_number_of(fields, "kind", location),
    )
