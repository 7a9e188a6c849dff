"""Chat log files: the log of each chat as one JSON file under `$LARDER_HOME/sessions`.

A file holds the log with its token ids, not the caches, which are prefilled again. It is replaced
atomically after every turn; a reader or a crash finds the old version or the new one.
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

from larder.core.errors import Damaged, InputError, Refused
from larder.core.home import LOCAL_PRINCIPAL, home
from larder.core.session_name import check_session_name
from larder.session.transcript.chat_log import ChatLog, chat_log_from_record, chat_log_record
from larder.store.digests import key_of
from larder.store.encryption import Encryption, NoEncryption
from larder.store.versions import StoredForm

SCHEMA = 1
CHAT_LOG_FORM = StoredForm("The session file", "schema", SCHEMA)
SEAL_HEADER = b"larder sealed 1\n"  # first bytes of an encrypted file
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class ChatIdentity:
    """Model and policy of a chat.

    Args:
        model: name that the model was loaded by.
        fingerprint: fingerprint of weights and configuration.
        policy: canonical spelling, sizes filled in.
    """

    model: str
    fingerprint: str
    policy: str


@dataclass(frozen=True)
class ChatRecord:
    """Log and identity of a chat, as read from disk."""

    log: ChatLog
    identity: ChatIdentity


class ChatLogStore(ABC):
    """Interface that saves and loads the log of one chat."""

    @abstractmethod
    def load(self) -> ChatRecord | None:
        """Load the saved log; None for a new chat."""

    @abstractmethod
    def save(self, log: ChatLog, identity: ChatIdentity) -> None:
        """Replace the saved log."""


class NoLogStore(ChatLogStore):
    """Null log store of a chat that ends with the process."""

    def load(self) -> ChatRecord | None:
        return None

    def save(self, log: ChatLog, identity: ChatIdentity) -> None:
        del log, identity


class ChatLogFile(ChatLogStore):
    """Log file of a chat. It never overwrites a version that it has not read or written.

    Args:
        name: session name, valid by `larder.core.session_name`.
        sealing: encryption of the file. With a key, an unencrypted file is rejected.

    Raises:
        InputError: the name is invalid.
    """

    def __init__(self, name: str, sealing: Encryption = NoEncryption()) -> None:  # noqa: B008, no state
        self.path, self._sealing = chat_log_path(name), sealing
        self._last_version: tuple[int, int, int] | None = None

    def load(self) -> ChatRecord | None:
        """Load the file; None if it does not exist.

        Raises:
            InputError: the file cannot be read, is damaged, or has another schema.
        """
        version = self._file_version()
        if version is None:
            return None
        record = _chat_record(self.path, _read_json(self.path, self._sealing))
        self._last_version = version
        return record

    def save(self, log: ChatLog, identity: ChatIdentity) -> None:
        """Replace the file atomically.

        Raises:
            InputError: the file cannot be written, or another process has changed it.
        """
        if self._file_version() != self._last_version:
            raise InputError(
                f"The session file {self.path} was changed by someone else since this chat read "
                "it: end the other chat, or go on under another name."
            )
        try:
            _atomic_write(self.path, self._encrypted(_encoded(_record(log, identity))))
        except OSError as error:
            raise InputError(
                f"The session file {self.path} cannot be written ({error.strerror}): make room, or "
                "set LARDER_HOME to another folder."
            ) from error
        self._last_version = self._file_version()

    def _encrypted(self, data: bytes) -> bytes:
        return _sealed_bytes(self._sealing, data, self.path.name)

    def _file_version(self) -> tuple[int, int, int] | None:
        """Inode, size and time of change, which differ for every save; None without a file."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(_unreadable_message(self.path, error)) from error
        return stat.st_ino, stat.st_size, stat.st_mtime_ns


def open_chat_log(name: str | None, encryption: Encryption = NoEncryption()) -> ChatLogStore:  # noqa: B008, no state
    """Log store of the chat of that name; without a name, one that ends with the process.

    Raises:
        InputError: the name is invalid.
    """
    return NoLogStore() if name is None else ChatLogFile(name, encryption)


def chat_log_path(name: str) -> Path:
    """Path of a chat log: its name, or a digest where that is not a plain file name.

    Raises:
        InputError: the name is invalid.
    """
    check_session_name(name)
    plain = name if _PLAIN.fullmatch(name) else f"~{key_of('chat', name)}"
    return home() / "sessions" / f"{plain}.json"


def seal_chat_logs(sealing: Encryption) -> int:
    """Encrypt all unencrypted chat logs in place; return their number.

    Raises:
        InputError: a file cannot be read or written.
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


def upgrade_chat_logs(sealing: Encryption) -> tuple[int, dict[str, str]]:
    """Carry over chat logs of earlier versions, each at once.

    Returns:
        their number, and why others are left as they are, by path.

    Raises:
        InputError: a file cannot be written.
    """
    count, refused = 0, dict[str, str]()
    for path in sorted((home() / "sessions").glob("*.json")):
        try:
            record = _read_json(path, sealing)
            schema = record.get("schema") if isinstance(record, dict) else None
            if schema == SCHEMA:
                continue
            record = {**CHAT_LOG_FORM.upgraded(record, schema), "schema": SCHEMA}
            _atomic_write(path, _sealed_bytes(sealing, _encoded(record), path.name))
            count += 1
        except (InputError, Refused) as error:
            refused[str(path)] = str(error)
        except OSError as error:
            raise InputError(_unreadable_message(path, error)) from error
    return count, refused


def _sealed_bytes(sealing: Encryption, data: bytes, name: str) -> bytes:
    encrypted = sealing.encrypt(LOCAL_PRINCIPAL, data, name)
    return SEAL_HEADER + encrypted if sealing.is_encrypted else encrypted


def _read_json(path: Path, sealing: Encryption) -> Any:
    """JSON of a session file.

    Raises:
        InputError: it cannot be read or opened.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(_unreadable_message(path, error)) from error
    is_sealed = data.startswith(SEAL_HEADER)
    if sealing.is_encrypted and not is_sealed:
        raise InputError(
            f"The session file {path} lies open though a key is given, so nobody can tell "
            "who has written it: 'larder cache seal --key-file FILE' seals it as it stands."
        )
    try:
        if is_sealed:
            data = sealing.decrypt(LOCAL_PRINCIPAL, data[len(SEAL_HEADER) :], path.name)
        return json.loads(data)
    except Damaged as error:
        raise InputError(_damaged_message(path, "it does not open with this key")) from error
    except (ValueError, RecursionError) as error:
        why = "it is under a key: give --key-file" if is_sealed else "it is not JSON"
        raise InputError(_damaged_message(path, why)) from error


def _chat_record(path: Path, record: Any) -> ChatRecord:
    """Parse a session file.

    Raises:
        InputError: it is not a session file, or has another schema.
    """
    if not isinstance(record, dict) or not isinstance(record.get("schema"), int):
        raise InputError(_damaged_message(path, "it has no schema number"))
    if (schema := record["schema"]) != SCHEMA:
        way = "use the Larder that wrote it, or another session name."
        if CHAT_LOG_FORM.can_upgrade(schema):
            way = CHAT_LOG_FORM.way_out(schema)
        raise InputError(
            f"The session file {path} has schema {schema}, this Larder reads {SCHEMA}: {way}"
        )
    try:
        model = record["model"]
        identity = ChatIdentity(
            model=str(model["name"]),
            fingerprint=str(model["fingerprint"]),
            policy=str(record["policy"]),
        )
        return ChatRecord(chat_log_from_record(record), identity)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            _damaged_message(path, f"{error} is missing or of a wrong kind")
        ) from error


def _record(log: ChatLog, identity: ChatIdentity) -> dict[str, Any]:
    model = {"name": identity.model, "fingerprint": identity.fingerprint}
    return {"schema": SCHEMA, "model": model, "policy": identity.policy, **chat_log_record(log)}


def _encoded(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, indent=1).encode()


def _unreadable_message(path: Path, error: OSError) -> str:
    return (
        f"The session file {path} cannot be read ({error.strerror}): check its permissions, or set "
        "LARDER_HOME to another folder."
    )


def _damaged_message(path: Path, reason: str) -> str:
    return (
        f"The session file {path} is damaged ({reason}): repair it, move it away, or take another "
        "session name."
    )


def _atomic_write(path: Path, data: bytes) -> None:
    """Write a temporary file, sync it to disk, and rename it over the target."""
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
