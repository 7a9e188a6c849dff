"""Loader of conversations from files of any format, from texts and from message lists, and reader
of JSON chat messages, with or without questions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from larder.core.arguments import check_type
from larder.core.conversation import Adversarial, Conversation, Message, PromptLayout, Question
from larder.core.errors import InputError, UsageError
from larder.session.files.json_fields import (
    fields_of,
    list_of,
    text_of,
    text_or_number_of,
    valid_unicode,
)

MAX_FILE_NAME_CHARS = 256  # longer texts are never reported as misplaced file names
ACCEPTED_INPUTS = "a Conversation, a text, a list of messages with role and content, or a Path"
SEPARATOR = "\n\n"  # behind every context, so that none runs into the next one
# A paragraph keeps the blank lines after it, so that the paragraphs joined are the file.
PARAGRAPH = re.compile(r"\s*\S.*?(?:\n\s*(?:\n|\Z)|\Z)", re.DOTALL)
CONVERSATION_SUFFIXES = (".json",)
DOCUMENT_SUFFIXES = (".txt", ".md")
# Texts that are documents where a file is named, but are not looked for in a folder.
LINE_SUFFIXES = (".rst", ".log", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js", ".ts")
FORMATTED_SUFFIXES = (".pdf", ".doc", ".docx", ".odt", ".rtf", ".html", ".htm", ".epub")
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


@dataclass(frozen=True)
class JsonFormat:
    """JSON format of conversations: its description, its test, and its reader."""

    shape: str
    matches: Callable[[object], bool]
    read: Callable[[object, str, Adversarial], Conversation]


ConversationLike = Conversation | str | Path | Sequence[Mapping[str, object]]


def _formats() -> Iterator[JsonFormat]:
    """Formats in the order in which they are tried; transcripts are imported when reached."""
    yield JsonFormat(
        CHAT_WITH_QUESTIONS_SHAPE,
        is_chat_with_questions,
        lambda data, name, _: read_chat_with_questions(data, name),
    )
    yield JsonFormat(
        CHAT_MESSAGES_SHAPE, is_chat_messages, lambda data, name, _: read_chat_messages(data, name)
    )
    from larder.session.files import locomo, realtalk

    yield JsonFormat(locomo.SHAPE, locomo.matches, locomo.read)
    yield JsonFormat(
        realtalk.SHAPE, realtalk.matches, lambda data, name, _: realtalk.read(data, name)
    )


def read_conversation(
    path: Path | str, adversarial: Adversarial = Adversarial.LEFT_OUT
) -> Conversation:
    """Read a chat, a LoCoMo or RealTalk transcript, or a document, named after its file.

    Args:
        path: a `.json`, `.txt` or `.md` file in UTF-8, or a log or a program (`LINE_SUFFIXES`),
            which is read as a document.
        adversarial: whether LoCoMo's questions without an answer are included.

    Returns:
        Messages in order, and the questions that the file has.

    Raises:
        InputError: the file is missing, unreadable, empty, or of no known form.

    Examples:
        >>> conversation = read_conversation("examples/conversation.json")
        >>> conversation.questions[0].answer
        'Biscuit'
    """
    path = Path(path)
    ending = path.suffix.lower()
    documents = DOCUMENT_SUFFIXES + LINE_SUFFIXES
    if path.is_fifo():
        return read_stream(path.read_bytes(), str(path), adversarial)
    if ending not in CONVERSATION_SUFFIXES + documents and path.is_file():
        known = ", ".join(CONVERSATION_SUFFIXES + documents)
        way = "rename it"
        if ending in FORMATTED_SUFFIXES:
            way = f"save its text as {path.stem}.txt, and give that"
        found = f"ends in {ending!r}" if ending else "has no ending"
        raise InputError(f"{path} {found}: a file must end in one of {known}; {way}.")
    text = _text(path)
    try:
        if ending in documents:
            return read_document(text, path.stem)
        return _read_json(_parse(text), path.stem, adversarial)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def read_stream(
    data: bytes, name: str, adversarial: Adversarial = Adversarial.LEFT_OUT
) -> Conversation:
    """Read what has no file ending, such as stdin: JSON of a known form, or else a document.

    Args:
        data: text in UTF-8.
        name: where it is from, for errors.

    Raises:
        InputError: it is empty, no text, or a malformed conversation.
    """
    text = _decoded(data, name)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return read_document(text, name)
    if not any(form.matches(content) for form in _formats()):
        return read_document(text, name)
    try:
        return _read_json(content, name, adversarial)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def conversation_of(
    conversation: ConversationLike | None, contexts: Sequence[str] | None = None
) -> Conversation:
    """Convert a value to a conversation, or several contexts to a document.

    Args:
        conversation: conversation; text, taken as a document; messages in the format of chat APIs,
            `[{"role": "user", "content": "..."}, ...]`; or path of a file. None with contexts.
        contexts: as for `read_contexts`.

    Raises:
        InputError: it is empty, a message is malformed, or a string looks like a file name.
        UsageError: both are given.
        BadParameter: it has another type.
    """
    if contexts is not None:
        if conversation is not None:
            raise UsageError(
                "A conversation and contexts were given, but one of the two is read: give a "
                "document as one more context, or ask about the conversation alone."
            )
        return read_contexts(contexts)
    if isinstance(conversation, Conversation):
        return conversation
    if isinstance(conversation, Path):
        return read_conversation(conversation)
    if isinstance(conversation, str):
        return _text_as_document(conversation)
    check_type("conversation", conversation, (list, tuple), ACCEPTED_INPUTS)
    assert conversation is not None  # no list
    return read_chat_messages(list(conversation), "messages")


def read_document(text: str, name: str) -> Conversation:
    """Document with one message per paragraph; the paragraphs joined are exactly `text`."""
    messages = tuple(
        Message("user", paragraph, utterance=paragraph.strip())
        for paragraph in PARAGRAPH.findall(text)
    )
    return Conversation(name=name, messages=messages, form=PromptLayout.DOCUMENT)


def read_contexts(contexts: Sequence[str]) -> Conversation:
    """Document with one message per context, which blank lines separate.

    Raises:
        InputError: there is no context, or one is empty.
        BadParameter: a context is no text.
    """
    types = "a list of texts"
    check_type("contexts", contexts, (list, tuple), types)
    if not contexts:
        raise InputError("contexts is empty: give at least one text.")
    for number, context in enumerate(contexts, start=1):
        check_type("contexts", context, str, types)
        if not valid_unicode(context, f"Context {number}").strip():
            raise InputError(f"Context {number} is empty: give a text, or leave it out.")
    messages = tuple(Message("user", context.rstrip() + SEPARATOR) for context in contexts)
    return Conversation("contexts", messages, form=PromptLayout.CONTEXTS)


def read_context_files(paths: Sequence[Path]) -> Conversation:
    """Document of several files, one context each, with the names of the files.

    Raises:
        InputError: a file cannot be read, or holds a conversation.
    """
    if found := next((path for path in paths if path.suffix in CONVERSATION_SUFFIXES), None):
        raise InputError(
            f"{found} is no document, as a context must be: name .txt or .md files, or ask about "
            "the conversation alone."
        )
    document = read_contexts([_text(path) for path in paths])
    return replace(document, name=", ".join(path.stem for path in paths))


def _text_as_document(text: str) -> Conversation:
    if not text.strip():
        raise InputError("The text is empty: give a conversation or a document.")
    if (
        text.endswith(CONVERSATION_SUFFIXES + DOCUMENT_SUFFIXES)
        and len(text) < MAX_FILE_NAME_CHARS
        and "\n" not in text
    ):
        raise InputError(
            f"{text!r} looks like the name of a file: give pathlib.Path({text!r}), or the text."
        )
    return read_document(valid_unicode(text, "The text"), "text")


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: check the spelling, or name another file.") from (
            error
        )
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder: name a file inside it.") from error
    except OSError as error:
        reason = error.strerror or "unknown reason"
        raise InputError(f"{path} cannot be read ({reason}): check its permissions.") from error
    return _decoded(data, path)


def _decoded(data: bytes, name: str | Path) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not text: byte {error.start} is not UTF-8; convert it to UTF-8."
        ) from error
    if "\0" in text:
        raise InputError(f"{name} is not text: it holds zero bytes; convert it to UTF-8.")
    if not text.strip():
        size = "empty" if not text else "blank"
        raise InputError(f"{name} is {size}: put a conversation or a document into it.")
    return text


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"broken JSON at line {error.lineno}, column {error.colno}: {error.msg}; mend it there."
        ) from error
    except (RecursionError, ValueError) as error:
        # Beyond the limits of the json module: nesting or integers beyond Python's limits.
        raise InputError(
            "the JSON nests too deeply or holds a number of thousands of digits: simplify it."
        ) from error


def _read_json(data: object, name: str, adversarial: Adversarial) -> Conversation:
    for form in _formats():
        if form.matches(data):
            return form.read(data, name, adversarial)
    shapes = "; ".join(form.shape for form in _formats())
    raise InputError(f"JSON of no known shape: it must be one of: {shapes}.")


def find_files(paths: Iterable[Path | str]) -> list[Path]:
    """Expand paths to files: a file gives itself, a folder the files directly in it.

    A folder gives its `.json` files in order of name, and its documents only if it has none, so
    that a README beside a data set is not taken for part of it. Hidden files are skipped, and
    duplicates are removed.

    Raises:
        InputError: a path does not exist, or a folder has no readable file.
    """
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        files.update(dict.fromkeys(_files_of(path)))
    return list(files)


def _files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"{path} does not exist: check the spelling, or name another file.")
    if not path.is_dir():
        return [path]
    for endings in (CONVERSATION_SUFFIXES, DOCUMENT_SUFFIXES):
        if files := _visible_files(path, endings):
            return files
    known = ", ".join(CONVERSATION_SUFFIXES + DOCUMENT_SUFFIXES)
    raise InputError(
        f"the folder {path} holds no readable file: it must directly contain {known} files."
    )


def _visible_files(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        reason = error.strerror or "unknown reason"
        raise InputError(
            f"the folder {folder} cannot be listed ({reason}): check its permissions."
        ) from error
    return [
        entry
        for entry in entries
        if entry.suffix.lower() in endings and entry.is_file() and not entry.name.startswith(".")
    ]
