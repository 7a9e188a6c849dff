"""A session as bytes: what was said, token for token, without its cache.

    {"format": "larder session", "version": 1, "fingerprint": ..., "root": ..., "said": [...]}

as JSON, compressed by zstd. Who reads it computes the cache again.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict, dataclass
from typing import Any

import zstandard

from larder.core.errors import InputError, LarderError
from larder.core.session_name import check
from larder.engine.sampling import Sampling
from larder.server.request import Turn
from larder.server.sitting import ID, Asked, Said, Sitting

FORMAT, VERSION = "larder session", 1
MOST_BYTES = 2**26  # of the JSON: what a stranger's file may unpack to
ROLES = ("", "system", "user", "assistant")  # the first of a text that is no conversation


@dataclass(frozen=True)
class Archived:
    """What is written of a session, as in `Sitting`."""

    root: str
    opening: tuple[Turn, ...]
    said: list[Said]


def spelled(session: Archived, fingerprint: str) -> bytes:
    """A session of a model."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint,
        "root": session.root,
        "opening": [asdict(turn) for turn in session.opening],
        "said": [_exchange(each) for each in session.said],
    }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return zstandard.ZstdCompressor().compress(text.encode())


def of(sitting: Sitting) -> Archived:
    """A session as it is now, and stays whatever becomes of it."""
    return Archived(sitting.root, sitting.opening, list(sitting.said))


def told(sitting: Sitting) -> bytes:
    """The same as bytes."""
    return spelled(of(sitting), sitting.rule.desk.decoder.spec.fingerprint)


def read(data: bytes, fingerprint: str, vocabulary: int) -> Archived:
    """What `spelled` has spelled.

    Args:
        fingerprint: of the model that is to go on with it.
        vocabulary: V.

    Raises:
        InputError: it is damaged, too large, of another version, or another model's.
    """
    document = _document(data)
    if document.get("fingerprint") != fingerprint:
        raise InputError(
            "The session was held with another model, whose tokens mean something else: import it "
            "where that model answers."
        )
    try:
        root = _text(document["root"])
        check(root)
        opening = tuple(_turn(each) for each in document["opening"])
        said = [_said(each, vocabulary) for each in document["said"]]
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, LarderError) as error:
        raise _damaged(str(error)) from error
    return Archived(root, opening, said)


def _document(data: bytes) -> dict[str, Any]:
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as stream:
            text = stream.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise _damaged(f"it unpacks to more than {MOST_BYTES} bytes")
        document = json.loads(text)
    except (zstandard.ZstdError, ValueError, RecursionError) as error:
        raise _damaged(str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _damaged("it is another kind of file")
    if document.get("version") != VERSION:
        raise InputError(
            f"The session's format is version {document.get('version')!r}, but this Larder reads "
            f"{VERSION}: export it with the same version."
        )
    return document


def _exchange(said: Said) -> dict[str, Any]:
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


def _said(told: Any, vocabulary: int) -> Said:
    prompt, answer = (_ids(told[name], vocabulary) for name in ("prompt", "answer"))
    unread = int(told["unread"])
    if not prompt or not 0 <= unread <= len(answer) + 1:
        raise ValueError(f"{unread} unread tokens of {len(answer)}")
    stop = tuple(_text(each) for each in told["stop"])
    asked = Asked(_sampling(told["sampling"]), int(told["max_new_tokens"]), stop)
    turns = tuple(_turn(each) for each in told["turns"])
    return Said(turns, prompt, _text(told["text"]), answer, unread, asked, _text(told["reason"]))


def _sampling(told: Any) -> Sampling:
    return Sampling(
        float(told["temperature"]), int(told["top_k"]), float(told["top_p"]), int(told["seed"])
    )


def _ids(told: Any, vocabulary: int) -> array:
    ids = array(ID, told)
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError("token ids outside the vocabulary")
    return ids


def _turn(told: Any) -> Turn:
    if told["role"] not in ROLES:
        raise ValueError("a message of nobody")
    return Turn(told["role"], _text(told["text"]))


def _text(told: object) -> str:
    """Raises: TypeError, ValueError: this is no text: JSON can spell halves of characters."""
    if not isinstance(told, str):
        raise TypeError("a number where a text should be")
    told.encode()
    return told


def _damaged(why: str) -> InputError:
    line = " ".join(why.split())[:200]
    return InputError(f"The session's file is damaged: {line}. Export the session anew.")
