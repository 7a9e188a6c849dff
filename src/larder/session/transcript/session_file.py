"""Where chats outlive the process: one JSON file each under `$LARDER_HOME/sessions`.

What is kept is what was said, token by token. Caches are not: they are read again. A file is
replaced in one step, after every turn; a reader or a crash finds the old one or the new one.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from larder.core.errors import Damaged, InputError
from larder.core.session_name import check_session_name
from larder.core.settings import LOCAL_PRINCIPAL, home
from larder.session.transcript.chat_log import ChatLog, chat_log_from_record, chat_log_record
from larder.store.digests import key_of
from larder.store.encryption import Encryption, NoEncryption

SCHEMA = 1
SEAL_HEADER = b"larder sealed 1\n"  # what a file begins with that is under a key
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class ChatIdentity:
    """Under what a chat was held.

    Args:
        model: the name it was loaded by.
        fingerprint: of its weights and configuration.
        policy: canonical spelling, sizes filled in.
    """

    model: str
    fingerprint: str
    policy: str


@dataclass(frozen=True)
class ChatRecord:
    """A chat as the disk has it."""

    log: ChatLog
    identity: ChatIdentity


class ChatLogStore(ABC):
    """Keeps the log of one chat."""

    @abstractmethod
    def load(self) -> ChatRecord | None:
        """What was kept; None for a new chat."""

    @abstractmethod
    def save(self, log: ChatLog, stamp: ChatIdentity) -> None:
        """Replace what was kept."""


class NoLogStore(ChatLogStore):
    """For a chat that ends with the process."""

    def load(self) -> ChatRecord | None:
        return None

    def save(self, log: ChatLog, stamp: ChatIdentity) -> None:
        del log, stamp


class SessionFile(ChatLogStore):
    """A chat by name. A file that this object did not read or write is never overwritten.

    Args:
        name: as `larder.core.session_name` allows it.
        sealing: how the file is hidden. Under a key one that lies open is refused.

    Raises:
        InputError: the name is none.
    """

    def __init__(self, name: str, sealing: Encryption = NoEncryption()) -> None:  # noqa: B008, no state
        self.path, self._sealing = session_path(name), sealing
        self._seen: tuple[int, int, int] | None = None

    def load(self) -> ChatRecord | None:
        """What was kept; None where there is no such file.

        Raises:
            InputError: the file cannot be read, is damaged, or is of another schema.
        """
        seen = self._file_version()
        if seen is None:
            return None
        kept = _chat_record(self.path, self._read_json())
        self._seen = seen
        return kept

    def save(self, log: ChatLog, stamp: ChatIdentity) -> None:
        """Replace the file in one step.

        Raises:
            InputError: it cannot be written, or another process has changed it.
        """
        if self._file_version() != self._seen:
            raise InputError(
                f"The session file {self.path} was changed by someone else since this chat read "
                "it: end the other chat, or go on under another name."
            )
        try:
            text = json.dumps(_record(log, stamp), ensure_ascii=False, indent=1)
            _atomic_write(self.path, self._closed(text.encode()))
        except OSError as error:
            raise InputError(
                f"The session file {self.path} cannot be written ({error.strerror}): make room, or "
                "set LARDER_HOME to another folder."
            ) from error
        self._seen = self._file_version()

    def _closed(self, data: bytes) -> bytes:
        return _sealed_bytes(self._sealing, data, self.path.name)

    def _read_json(self) -> Any:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise InputError(_unreadable_message(self.path, error)) from error
        is_sealed = data.startswith(SEAL_HEADER)
        if self._sealing.is_encrypted and not is_sealed:
            raise InputError(
                f"The session file {self.path} lies open though a key is given, so nobody can tell "
                "who has written it: 'larder cache seal --key-file FILE' seals it as it stands."
            )
        try:
            if is_sealed:
                data = self._sealing.opened(
                    LOCAL_PRINCIPAL, data[len(SEAL_HEADER) :], self.path.name
                )
            return json.loads(data)
        except Damaged as error:
            raise InputError(
                _damaged_message(self.path, "it does not open with this key")
            ) from error
        except (ValueError, RecursionError) as error:
            why = "it is under a key: give --key-file" if is_sealed else "it is not JSON"
            raise InputError(_damaged_message(self.path, why)) from error

    def _file_version(self) -> tuple[int, int, int] | None:
        """Tells one version of the file from the next: every save makes a new one."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(_unreadable_message(self.path, error)) from error
        return found.st_ino, found.st_size, found.st_mtime_ns


def session_path(name: str) -> Path:
    """The file of a chat: called like it, or by a digest where the name is not a plain file name.

    Raises:
        InputError: a name that no session can have.
    """
    check_session_name(name)
    plain = name if _PLAIN.fullmatch(name) else f"~{key_of('chat', name)}"
    return home() / "sessions" / f"{plain}.json"


def seal_session_files(sealing: Encryption) -> int:
    """Seal the files of chats that lie open, as they stand; how many there were.

    Raises:
        InputError: one cannot be read or written.
    """
    count = 0
    for path in sorted((home() / "sessions").glob("*.json")):
        try:
            data = path.read_bytes()
            if not data.startswith(SEAL_HEADER):
                _atomic_write(path, _sealed_bytes(sealing, data, path.name))
                count += 1
        except OSError as error:
            raise InputError(_unreadable_message(path, error)) from error
    return count


def _sealed_bytes(sealing: Encryption, data: bytes, name: str) -> bytes:
    closed = sealing.closed(LOCAL_PRINCIPAL, data, name)
    return SEAL_HEADER + closed if sealing.is_encrypted else closed


def _chat_record(path: Path, record: Any) -> ChatRecord:
    """Raises: InputError: it is no session, or one of another schema."""
    if not isinstance(record, dict) or not isinstance(record.get("schema"), int):
        raise InputError(_damaged_message(path, "it has no schema number"))
    if record["schema"] != SCHEMA:
        raise InputError(
            f"The session file {path} has schema {record['schema']}, this Larder reads {SCHEMA}: "
            "use the Larder that wrote it, or another session name."
        )
    try:
        told = record["model"]
        stamp = ChatIdentity(str(told["name"]), str(told["fingerprint"]), str(record["policy"]))
        return ChatRecord(chat_log_from_record(record), stamp)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            _damaged_message(path, f"{error} is missing or of a wrong kind")
        ) from error


def _record(log: ChatLog, stamp: ChatIdentity) -> dict[str, Any]:
    model = {"name": stamp.model, "fingerprint": stamp.fingerprint}
    return {"schema": SCHEMA, "model": model, "policy": stamp.policy, **chat_log_record(log)}


def _unreadable_message(path: Path, error: OSError) -> str:
    return (
        f"The session file {path} cannot be read ({error.strerror}): check its permissions, or set "
        "LARDER_HOME to another folder."
    )


def _damaged_message(path: Path, why: str) -> str:
    return (
        f"The session file {path} is damaged ({why}): repair it, move it away, or take another "
        "session name."
    )


def _atomic_write(path: Path, data: bytes) -> None:
    """Write beside the file, force it to the disk, and only then take its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
