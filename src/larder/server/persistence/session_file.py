"""A session as bytes: what was said, token for token, without its cache.

    {"format": "larder session", "version": 1, "fingerprint": ..., "root": ..., "said": [...]}

as JSON, compressed by zstd. Who reads it computes the cache again.
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
from larder.server.session_state import (
    TOKEN_TYPECODE,
    CompletedTurn,
    GenerationParams,
    SessionState,
)

FORMAT, VERSION = "larder session", 1
IMPORT_BYTES = 2**23  # of one that somebody sends: 700,000 tokens with their text
TOKEN_CHARACTERS = 64  # more than tokens have on average, in any text that says something
ROLES = ("", "system", "user", "assistant")  # the first of a text that is no conversation


@dataclass(frozen=True)
class SessionFileLimit:
    """How large a session may be that is read.

    Args:
        bytes: of the JSON.
        tokens: that were said; of each token so many characters of text.
    """

    bytes: int
    tokens: int


STORE_LIMIT = SessionFileLimit(2**26, 2**26)  # of a session that this server has written


class SessionFileHeader(msgspec.Struct):
    """What kind of file it is; a file of another kind may have none of it."""

    format: str = ""
    version: int | str | float | bool | None = None
    fingerprint: str = ""


class MessageRecord(msgspec.Struct, gc=False):
    """A message."""

    role: str
    text: str


class SamplingRecord(msgspec.Struct, gc=False):
    """How tokens were drawn."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


class TurnRecord(msgspec.Struct):
    """A question with its answer."""

    turns: list[MessageRecord]
    prompt: list[int]
    text: str
    answer: list[int]
    unread: int
    sampling: SamplingRecord
    max_new_tokens: int
    stop: list[str]
    reason: str


class SessionFileDocument(msgspec.Struct):
    """The whole file."""

    root: str
    opening: list[MessageRecord]
    said: list[TurnRecord]

    @property
    def num_tokens(self) -> int:
        """Tokens that were said; where there are more messages, as many: each has one or more."""
        messages = len(self.opening) + sum(len(each.turns) for each in self.said)
        return max(sum(len(each.prompt) + len(each.answer) for each in self.said), messages)

    @property
    def num_characters(self) -> int:
        """Characters of all texts; a stop string counts as a token more, for it takes memory even
        where it is empty."""
        texts = [turn.text for turn in self.opening]
        total = 0
        for each in self.said:
            texts += [each.text, each.reason, *(turn.text for turn in each.turns)]
            total += sum(TOKEN_CHARACTERS + len(stop) for stop in each.stop)
        return total + sum(map(len, texts))


Part = TypeVar("Part", bound=msgspec.Struct)


@dataclass(frozen=True)
class TranscriptSnapshot:
    """What is written of a session, as in `SessionState`."""

    root: str
    opening: tuple[ChatMessage, ...]
    said: list[CompletedTurn]


def encode(session: TranscriptSnapshot, fingerprint: str) -> bytes:
    """A session of a model."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint,
        "root": session.root,
        "opening": [asdict(turn) for turn in session.opening],
        "said": [_turn_record(each) for each in session.said],
    }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return zstandard.ZstdCompressor().compress(text.encode())


def take_snapshot(sitting: SessionState) -> TranscriptSnapshot:
    """A session as it is now, and stays whatever becomes of it."""
    return TranscriptSnapshot(sitting.root, sitting.opening, list(sitting.said))


def encode_session(sitting: SessionState) -> bytes:
    """The same as bytes."""
    return encode(take_snapshot(sitting), sitting.rule.desk.decoder.spec.fingerprint)


def decode(
    data: bytes, fingerprint: str, vocabulary: int, limit: SessionFileLimit = STORE_LIMIT
) -> TranscriptSnapshot:
    """What `encode` has spelled.

    Args:
        fingerprint: of the model that is to go on with it.
        vocabulary: V.
        limit: of what it holds.

    Raises:
        InputError: it is damaged, too large, of another version, or another model's.
    """
    text = _unpacked(data, limit.bytes)
    head = _parsed(text, SessionFileHeader)
    if head.format != FORMAT:
        raise _damaged("it is another kind of file")
    if head.version != VERSION:
        raise InputError(
            f"The session's format is version {head.version!r}, but this Larder reads "
            f"{VERSION}: export it with the same version."
        )
    if head.fingerprint != fingerprint:
        raise InputError(
            "The session was held with another model, whose tokens mean something else: import it "
            "where that model answers."
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
            f"The session has {document.num_characters} characters, but {longest} are more than "
            "the model can read: import a shorter one."
        )
    try:
        check_session_name(document.root)
        opening = tuple(_message(each) for each in document.opening)
        said = [_completed_turn(each, vocabulary) for each in document.said]
    except (TypeError, ValueError, OverflowError, LarderError) as error:
        raise _damaged(str(error)) from error
    return TranscriptSnapshot(document.root, opening, said)


def _unpacked(data: bytes, limit_bytes: int) -> bytes:
    """The JSON; nothing is allocated before the frame has said how much it is."""
    try:
        size = zstandard.frame_content_size(data)
        if size < 0:
            raise _damaged("it does not say how large it is")
        if size > limit_bytes:
            raise _damaged(f"it unpacks to {size} bytes, more than {limit_bytes}")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _damaged(str(error)) from error


def _parsed(text: bytes, kind: type[Part]) -> Part:
    """Fields of the JSON; all others are skipped, not built."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise _damaged(str(error)) from error


def _turn_record(said: CompletedTurn) -> dict[str, Any]:
    return {
        "turns": [asdict(turn) for turn in said.turns],
        "prompt": said.prompt.tolist(),
        "text": said.text,
        "answer": said.answer.tolist(),
        "unread": said.unread,
        "sampling": asdict(said.asked.sampling),
        "max_new_tokens": said.asked.max_new_tokens,
        "stop": list(said.asked.stop),
        "reason": said.reason,
    }


def _completed_turn(told: TurnRecord, vocabulary: int) -> CompletedTurn:
    prompt, answer = _ids(told.prompt, vocabulary), _ids(told.answer, vocabulary)
    unread = told.unread
    if not prompt or not 0 <= unread <= len(answer) + 1:
        raise ValueError(f"{unread} unread tokens of {len(answer)}")
    drawn = told.sampling
    sampling = SamplingParams(drawn.temperature, drawn.top_k, drawn.top_p, drawn.seed)
    asked = GenerationParams(sampling, told.max_new_tokens, tuple(told.stop))
    turns = tuple(_message(each) for each in told.turns)
    return CompletedTurn(turns, prompt, told.text, answer, unread, asked, told.reason)


def _ids(told: list[int], vocabulary: int) -> array:
    ids = array(TOKEN_TYPECODE, told)
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError("token ids outside the vocabulary")
    return ids


def _message(told: MessageRecord) -> ChatMessage:
    if told.role not in ROLES:
        raise ValueError("a message of nobody")
    return ChatMessage(told.role, told.text)


def _damaged(why: str) -> InputError:
    line = " ".join(why.split())[:200]
    return InputError(f"The session's file is damaged: {line}. Export the session anew.")
