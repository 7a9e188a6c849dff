"""Read one file, whatever its format, as a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from larder.core.arguments import check_type
from larder.core.conversation import Conversation
from larder.core.errors import InputError
from larder.session.files import chat_messages, document, locomo, realtalk
from larder.session.files.locomo import Adversarial


@dataclass(frozen=True)
class JsonFormat:
    """One shape that a JSON file may have: how to describe, recognise and read it."""

    shape: str
    matches: Callable[[object], bool]
    read: Callable[[object, str, Adversarial], Conversation]


ConversationLike = Conversation | str | Path | Sequence[Mapping[str, object]]
MAX_FILE_NAME_CHARS = 256  # characters of a text that may be the name of a file by mistake
ACCEPTED_INPUTS = "a Conversation, a text, a list of messages with role and content, or a Path"
FORMATS = (
    JsonFormat(
        chat_messages.CHAT_WITH_QUESTIONS_SHAPE,
        chat_messages.is_chat_with_questions,
        lambda data, name, _: chat_messages.read_chat_with_questions(data, name),
    ),
    JsonFormat(
        chat_messages.CHAT_MESSAGES_SHAPE,
        chat_messages.is_chat_messages,
        lambda data, name, _: chat_messages.read_chat_messages(data, name),
    ),
    JsonFormat(locomo.SHAPE, locomo.matches, locomo.read),
    JsonFormat(realtalk.SHAPE, realtalk.matches, lambda data, name, _: realtalk.read(data, name)),
)


def read_conversation(
    path: Path | str, adversarial: Adversarial = Adversarial.LEFT_OUT
) -> Conversation:
    """Read a chat, a LoCoMo or RealTalk transcript, or a document, named after its file.

    Args:
        path: a `.json`, `.txt` or `.md` file in UTF-8.
        adversarial: whether LoCoMo's questions without an answer are asked too.

    Raises:
        InputError: the file is missing, unreadable, empty, or of no known form.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in CONVERSATION_SUFFIXES + DOCUMENT_SUFFIXES and path.is_file():
        known = ", ".join(CONVERSATION_SUFFIXES + DOCUMENT_SUFFIXES)
        raise InputError(
            f"{path} ends in {ending or 'nothing'!r}: a file must end in one of {known}; rename it."
        )
    text = _text(path)
    try:
        if ending in DOCUMENT_SUFFIXES:
            return document.read_document(text, path.stem)
        return _read_json(_parse(text), path.stem, adversarial)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def conversation_of(given: ConversationLike) -> Conversation:
    """A conversation from whatever a program has at hand.

    Args:
        given: a conversation; a text, which is a document; messages as chat APIs have them,
            `[{"role": "user", "content": "..."}, ...]`; or the path of a file.

    Raises:
        InputError: it is empty, a message is none, or a string is the name of a file.
        BadParameter: it is of another type.
    """
    if isinstance(given, Conversation):
        return given
    if isinstance(given, Path):
        return read_conversation(given)
    if isinstance(given, str):
        return _document(given)
    check_type("conversation", given, (list, tuple), ACCEPTED_INPUTS)
    return chat_messages.read_chat_messages(list(given), "messages")


def _document(text: str) -> Conversation:
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
    return document.read_document(text, "text")


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: check the spelling, or name another file.") from (
            error
        )
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder: name a file inside it.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not text: byte {error.start} is not UTF-8; convert the file to UTF-8."
        ) from error
    except OSError as error:
        reason = error.strerror or "unknown reason"
        raise InputError(f"{path} cannot be read ({reason}): check its permissions.") from error
    if "\0" in text:
        raise InputError(f"{path} is not text: it holds zero bytes; convert the file to UTF-8.")
    if not text.strip():
        size = "empty" if not text else "blank"
        raise InputError(f"{path} is {size}: put a conversation or a document into it.")
    return text


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"broken JSON at line {error.lineno}, column {error.colno}: {error.msg}; mend it there."
        ) from error
    except (RecursionError, ValueError) as error:
        # What json cannot hold though it parses: nesting or integers beyond Python's limits.
        raise InputError(
            "the JSON nests too deeply or holds a number of thousands of digits: simplify it."
        ) from error


def _read_json(data: object, name: str, adversarial: Adversarial) -> Conversation:
    for form in FORMATS:
        if form.matches(data):
            return form.read(data, name, adversarial)
    shapes = "; ".join(form.shape for form in FORMATS)
    raise InputError(f"JSON of no known shape: it must be one of: {shapes}.")


CONVERSATION_SUFFIXES = (".json",)
DOCUMENT_SUFFIXES = (".txt", ".md")


def find_files(paths: Iterable[Path | str]) -> list[Path]:
    """The files meant by `paths`: a file stands for itself, a folder for what lies directly in it.

    A folder yields its `.json` files in order of name. Only if it has none does it yield its
    documents, so that a README beside a data set is not taken for part of it. Hidden files are
    passed over, and a file named twice is read once.

    Raises:
        InputError: a path does not exist, or a folder holds nothing that can be read.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        found.update(dict.fromkeys(_files_of(path)))
    return list(found)


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
