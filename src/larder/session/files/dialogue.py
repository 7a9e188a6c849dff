"""Text form of a dialogue of two named people, as the model reads it.

    The following is ... between A and B ...         opening

    DATE: 8 May 2023                                 ┐
    CONVERSATION:                                    │ content of the first message of a session
    A said, "Hello."                                 ┘
    B said, "Look!"                                  ┐ content of the next message
    and shared a photo of a dog                      ┘

The header of a session belongs to the content of its first utterance. As a message of its own it
would count as an utterance wherever a conversation is cut by utterances, and a segment could be a
bare date; this way there are exactly as many messages as utterances, and the span of a segment
carries the date it falls under. Contents end in their newlines: opening and contents joined with
nothing in between are the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from larder.core.conversation import Message
from larder.core.errors import InputError
from larder.session.files.json_fields import Fields, list_of, text_of

SESSION_KEY = re.compile(r"session_(\d+)")


@dataclass(frozen=True)
class Utterance:
    """Utterance with speaker, text, date, and the line about a shared picture, if any."""

    speaker: str
    text: str
    date: str
    picture: str = ""


@dataclass(frozen=True)
class DialogueSession:
    """Utterances of one session under its date."""

    date: str
    utterances: tuple[Utterance, ...]


def sessions(
    fields: Fields, location: str, utterance: Callable[[object, str, str], Utterance]
) -> Iterator[DialogueSession]:
    """Sessions of the fields `session_1`, `session_1_date_time` and so on.

    Args:
        location: of the fields, for messages.
        utterance: reads an entry, given its location and the session's date.

    Raises:
        InputError: a session has no date or no list of entries.
    """
    for number in session_numbers(fields):
        key = f"session_{number}"
        date = text_of(fields, f"{key}_date_time", location)
        entries = enumerate(list_of(fields[key], f"{key!r}"), 1)
        yield DialogueSession(date, tuple(utterance(e, f"{key}, {n}", date) for n, e in entries))


def utterance_text(message: Message) -> str:
    """Text of an utterance, without the name that `messages` puts before it."""
    text = message.utterance.strip() or message.content
    head = f'{message.speaker} said, "'
    if message.speaker and text.startswith(head):
        return text.removeprefix(head).removesuffix('"')
    return text


def opening(first: str, second: str) -> str:
    """First sentence of the transcript, which describes it to the model."""
    return (
        f"The following is everything that {first} and {second} wrote to each other over many "
        "sessions; the date of each session stands at its head.\n\n"
    )


def messages(sessions: Iterable[DialogueSession]) -> tuple[Message, ...]:
    """One message per utterance, with the header of the session before its first."""
    result: list[Message] = []
    for session in sessions:
        header = f"DATE: {session.date}\nCONVERSATION:\n"
        if result:
            header = "\n" + header
        for utterance in session.utterances:
            result.append(_message(utterance, header))
            header = ""
    if not result:
        raise InputError("no session holds an utterance: give the transcript at least one.")
    return tuple(result)


def session_numbers(fields: Fields) -> list[int]:
    """Numbers n of all fields `session_n`, ascending."""
    return sorted(int(match[1]) for match in map(SESSION_KEY.fullmatch, fields) if match)


def _message(utterance: Utterance, header: str) -> Message:
    # A line break inside an utterance would look like the start of another one.
    quoted = f'{utterance.speaker} said, "{" ".join(utterance.text.split())}"'
    lines = [quoted, utterance.picture] if utterance.picture else [quoted]
    return Message(
        role="user",
        content=header + "".join(f"{line}\n" for line in lines),
        speaker=utterance.speaker,
        date=utterance.date,
        utterance=quoted,
    )
