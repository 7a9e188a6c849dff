"""Session file: the transcript of a session with its token ids, without its cache.

    {"format": "larder session", "version": 1, "fingerprint": ..., "root": ..., "said": [...]}

JSON, compressed by zstd. The cache is recomputed after an import.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgspec
import zstandard

from larder.core.errors import InputError, LarderError
from larder.core.session_name import check_session_name
from larder.engine.sampler import SamplingParams
from larder.server.request import ChatMessage
from larder.server.session_state import SessionState
from larder.server.transcript import MAX_TOKEN_ID, TOKEN_TYPECODE, CompletedTurn, GenerationParams
from larder.session.transcript.chat_template import TOOL_ROLE, VARIABLES_ROLE, image_digests

FORMAT, VERSION = "larder session", 1
IMPORT_BYTES = 2**23  # of an imported session: 700,000 tokens with their text
TOKEN_CHARACTERS = 64  # above the average length of a token in any real text
OLDEST_SAMPLING = ("temperature", "top_k", "top_p", "seed")  # fields that every file has
ROLES = ("", VARIABLES_ROLE, "system", "user", "assistant", TOOL_ROLE)  # "" is that of a raw prompt


@dataclass(frozen=True)
class SessionFileLimit:
    """Size limits of a session file.

    Args:
        bytes: of the JSON.
        tokens: of the transcript; its characters are limited to `TOKEN_CHARACTERS` per token.
    """

    bytes: int
    tokens: int


STORE_LIMIT = SessionFileLimit(2**26, 2**26)  # of sessions written by this server


class SessionFileHeader(msgspec.Struct):
    """Format, version and model of a file; all optional, since a file of another kind may lack
    them."""

    format: str = ""
    version: int | str | float | bool | None = None
    fingerprint: str = ""


class MessageRecord(msgspec.Struct, gc=False):
    """A message in the file."""

    role: str
    text: str


class SamplingRecord(msgspec.Struct, gc=False):
    """Sampling parameters in the file."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}

    @staticmethod
    def of(sampling: SamplingParams) -> dict[str, Any]:
        """JSON of sampling parameters; those that earlier versions lack only where they are set."""
        neutral = asdict(SamplingParams())
        return {
            name: value
            for name, value in asdict(sampling).items()
            if value != neutral[name] or name in OLDEST_SAMPLING
        }


class TurnRecord(msgspec.Struct):
    """A completed turn in the file."""

    turns: list[MessageRecord]
    prompt: list[int]
    text: str
    answer: list[int]
    unread: int
    sampling: SamplingRecord
    max_new_tokens: int
    stop: list[str]
    reason: str
    constraint: str = ""


class SessionFileDocument(msgspec.Struct):
    """Contents of the file."""

    root: str
    opening: list[MessageRecord]
    said: list[TurnRecord]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, or of messages if that is larger: a message has one token or more."""
        messages = len(self.opening) + sum(len(each.turns) for each in self.said)
        return max(sum(len(each.prompt) + len(each.answer) for each in self.said), messages)

    @property
    def num_characters(self) -> int:
        """Characters of all texts. A stop string counts as a token more, since even an empty one
        takes memory."""
        texts = [turn.text for turn in self.opening]
        total = 0
        for each in self.said:
            texts += [each.text, each.reason, *(turn.text for turn in each.turns)]
            total += sum(TOKEN_CHARACTERS + len(stop) for stop in each.stop)
        return total + sum(map(len, texts))


Part = TypeVar("Part", bound=msgspec.Struct)
# Made by one thread, on import: msgspec crashes where two threads are the first to decode a struct.
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (SessionFileHeader, SessionFileDocument)
}


@dataclass(frozen=True)
class TranscriptSnapshot:
    """The stored part of a session; fields as in `SessionIdentity` and `Transcript`."""

    root: str
    opening_messages: tuple[ChatMessage, ...]
    turns: list[CompletedTurn]


def encode(session: TranscriptSnapshot, fingerprint: str) -> bytes:
    """A transcript as a session file of the model with this fingerprint."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint,
        "root": session.root,
        "opening": [asdict(turn) for turn in session.opening_messages],
        "said": [_turn_record(each) for each in session.turns],
    }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return zstandard.ZstdCompressor().compress(text.encode())


def take_snapshot(session: SessionState) -> TranscriptSnapshot:
    """Copy of a session's transcript, unaffected by later turns."""
    return TranscriptSnapshot(
        session.root, session.transcript.opening_messages, list(session.turns)
    )


def decode(
    data: bytes, fingerprint: str, vocabulary: int, limit: SessionFileLimit = STORE_LIMIT
) -> TranscriptSnapshot:
    """The transcript in a session file.

    Args:
        fingerprint: of the model that will continue it.
        vocabulary: V.
        limit: size limits.

    Raises:
        InputError: the file is damaged, too large, of another version or of another model.
    """
    text = _unpacked(data, limit.bytes)
    head = _parsed(text, SessionFileHeader)
    if head.format != FORMAT:
        raise _damaged("it is not a session file")
    if head.version != VERSION:
        raise InputError(
            f"The session's format is version {head.version!r}, but this Larder reads "
            f"{VERSION}: export it with the same version."
        )
    if head.fingerprint != fingerprint:
        raise InputError(
            "The session belongs to another model, with other token ids: import it on a server of "
            "that model."
        )
    document = _parsed(text, SessionFileDocument)
    if document.num_tokens > limit.tokens:
        raise InputError(
            f"The session has {document.num_tokens} tokens or messages, but the model reads "
            f"{limit.tokens}: import a shorter one."
        )
    longest = TOKEN_CHARACTERS * limit.tokens
    if document.num_characters > longest:
        raise InputError(
            f"The session has {document.num_characters} characters, more than the {longest} that "
            "the model can read: import a shorter one."
        )
    try:
        check_session_name(document.root)
        opening = tuple(_message(each) for each in document.opening)
        turns = [_completed_turn(each, vocabulary) for each in document.said]
    except (TypeError, ValueError, OverflowError, LarderError) as error:
        raise _damaged(str(error)) from error
    return TranscriptSnapshot(document.root, opening, turns)


def _unpacked(data: bytes, limit_bytes: int) -> bytes:
    """Decompressed JSON; the size in the frame header is checked before anything is allocated."""
    try:
        size = zstandard.frame_content_size(data)
        if size < 0:
            raise _damaged("its frame has no content size")
        if size > limit_bytes:
            raise _damaged(f"it unpacks to {size} bytes, more than {limit_bytes}")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _damaged(str(error)) from error


def _parsed(text: bytes, kind: type[Part]) -> Part:
    """Fields of `kind` in the JSON; others are skipped without being built."""
    try:
        return _DECODERS[kind].decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise _damaged(str(error)) from error


def _turn_record(turn: CompletedTurn) -> dict[str, Any]:
    return {
        "turns": [asdict(message) for message in turn.messages],
        "prompt": turn.prompt_ids.tolist(),
        "text": turn.text,
        "answer": turn.answer_ids.tolist(),
        "unread": turn.unread_tokens,
        "sampling": SamplingRecord.of(turn.params.sampling),
        "max_new_tokens": turn.params.max_new_tokens,
        "stop": list(turn.params.stop),
        "reason": turn.reason,
        **({"constraint": turn.params.constraint} if turn.params.constraint else {}),
    }


def _completed_turn(record: TurnRecord, vocabulary: int) -> CompletedTurn:
    messages = tuple(_message(each) for each in record.turns)
    has_images = any(image_digests(each.text) for each in messages)
    prompt = _ids(record.prompt, MAX_TOKEN_ID if has_images else vocabulary)
    answer, unread = _ids(record.answer, vocabulary), record.unread
    if not prompt or not 0 <= unread <= len(answer) + 1:
        raise ValueError(f"a turn has {unread} unread tokens, but {len(answer)} in its answer")
    sampling = SamplingParams(**msgspec.structs.asdict(record.sampling))
    stop = tuple(record.stop)
    params = GenerationParams(sampling, record.max_new_tokens, stop, record.constraint)
    return CompletedTurn(messages, prompt, record.text, answer, unread, params, record.reason)


def _ids(tokens: list[int], vocabulary: int) -> array:
    ids = array(TOKEN_TYPECODE, tokens)
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError("token ids outside the vocabulary")
    return ids


def _message(record: MessageRecord) -> ChatMessage:
    if record.role not in ROLES:
        raise ValueError(f"unknown role {record.role!r}")
    return ChatMessage(record.role, record.text)


def _damaged(reason: str) -> InputError:
    line = " ".join(reason.split())[:200]
    return InputError(f"The session's file is damaged: {line}. Export the session again.")
