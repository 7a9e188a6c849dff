"""Incremental detokenization: streamed pieces join to the final text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from larder.engine import CONTEXT_TOKENS, IncrementalDetokenizer


def plain(ids: Sequence[int]) -> str:
    """The text of tokens that are bytes."""
    return bytes(ids).decode("utf-8", "replace")


def streamed(text: str, stops: Sequence[str] = ()) -> tuple[list[str], str]:
    """The pieces of a text whose tokens are bytes, and the text that was kept."""
    pieces = list[str]()
    stream = IncrementalDetokenizer(plain, stops, pieces.append)
    for token in text.encode():
        if not stream.push(token):
            break
    stream.finish()
    return pieces, stream.text


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("a €uro and a 🙂", (), "a €uro and a 🙂"),
        ("one STOP two", ("STOP",), "one "),
        ("one ab€ two", ("ab€",), "one "),
        ("one ab€ two", ("€ t", "two"), "one ab"),
        ("one abc", ("ab€",), "one abc"),
        ("one ab", ("abc",), "one ab"),
        ("ab", ("b", "ab"), ""),
    ],
)
def test_streamed_text_equals_the_final_text(text: str, stops: Sequence[str], kept: str) -> None:
    pieces, result = streamed(text, stops)
    assert "".join(pieces) == result == kept


WORDS = (
    "\u2581",
    "\u2581the",
    "\u2581ca",
    "ts",
    "##s",
    "n",
    "'t",
    " n't",
    ".",
    ",",
    "\n",
    "do",
    " ",
)
CHARACTERS = ("é", "€", "🙂", "a")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCABULARY = {text: number for number, text in enumerate((*BYTES, *WORDS))}
DECODERS = {
    "bytes of characters": decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "white space that goes": decoders.WordPiece(prefix="##", cleanup=True),
    "a mark for white space": decoders.Metaspace(),
}


def decoder(name: str) -> Callable[[Sequence[int]], str]:
    tokenizer = Tokenizer(WordLevel(VOCABULARY, "<0x00>"))
    tokenizer.decoder = DECODERS[name]
    return lambda ids: tokenizer.decode(list(ids))


def parts(pieces: Sequence[str]) -> list[int]:
    """The tokens of some words and characters."""
    result = [[VOCABULARY[each]] if each in VOCABULARY else list(each.encode()) for each in pieces]
    return [token for each in result for token in each]


@given(pieces=st.lists(st.sampled_from((*WORDS, *CHARACTERS)), max_size=80))
@pytest.mark.parametrize("name", DECODERS)
def test_incremental_text_equals_decoding_all_tokens(name: str, pieces: list[str]) -> None:
    decode, result, ids = decoder(name), list[str](), parts(pieces)
    stream = IncrementalDetokenizer(decode, (), result.append)
    for token in ids:
        assert stream.push(token)
    stream.finish()
    assert stream.text == decode(ids)
    if "goes" not in name:  # what was handed on cannot go any more
        assert "".join(result) == stream.text


@given(raw=st.binary(max_size=80), stop=st.sampled_from(["", "ab", "€", "\ufffd€"]))
def test_invalid_utf8_is_streamed_as_replacement_characters(raw: bytes, stop: str) -> None:
    result = list[str]()
    stream = IncrementalDetokenizer(plain, [stop], result.append)
    whole = all(stream.push(byte) for byte in raw)
    stream.finish()
    decoded = raw.decode("utf-8", "replace")
    assert "".join(result) == stream.text and decoded.startswith(stream.text.rstrip("\ufffd"))
    assert not whole or stream.text == decoded


@pytest.mark.parametrize("text", ["and so on, ", "€uro", "🙂", "€", "é"])
@pytest.mark.parametrize("name", ["bytes of characters", "bytes"])
def test_cost_per_token_is_constant(name: str, text: str) -> None:
    decoded = list[int]()
    own = plain if name == "bytes" else decoder(name)

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return own(ids)

    stream, raw = IncrementalDetokenizer(decode, ("never",), lambda _: None), text.encode() * 100
    for token in raw:
        stream.push(token)
    assert stream.text == own(raw) and max(decoded) <= 4 * CONTEXT_TOKENS
    assert sum(decoded) <= 4 * CONTEXT_TOKENS * len(raw)
