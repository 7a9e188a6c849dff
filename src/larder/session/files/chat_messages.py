"""A JSON list of chat messages, as chat programs and APIs write it."""

from __future__ import annotations

from larder.core.conversation import Conversation, Message
from larder.core.errors import InputError
from larder.session.files.json_fields import fields_of, list_of, text_of, text_or_number_of

CHAT_MESSAGES_SHAPE = 'a list of messages [{"role", "content", "date"?}, ...]'
ROLES = ("system", "user", "assistant")


def is_chat_messages(data: object) -> bool:
    """Any list is taken for messages, so that a slip in one is named, not the whole refused."""
    return isinstance(data, list)


def read_chat_messages(data: object, name: str) -> Conversation:
    """The messages as a chat, without questions."""
    return Conversation(name=name, messages=read_messages(data))


def read_messages(data: object) -> tuple[Message, ...]:
    """The messages of a list, in order.

    A date is shown to the model where it changes, on a line of its own before a message that is not
    the assistant's: a model that reads dates in its own turns goes on to write them. `utterance` is
    the text alone.
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


def _message(entry: object, place: str) -> Message:
    fields = fields_of(entry, place)
    if "conversation" in fields:
        raise InputError(f"{place} is a whole LoCoMo sample: write each sample to its own file.")
    role = text_of(fields, "role", place)
    if role not in ROLES:
        raise InputError(f"{place}: unknown role {role!r}; a role is one of {', '.join(ROLES)}.")
    content = text_of(fields, "content", place)
    return Message(role, content, date=text_or_number_of(fields, "date", place))


def _message_with_date(message: Message) -> Message:
    content = f"[{message.date}]\n{message.content}"
    return Message(message.role, content, date=message.date, utterance=message.content)
