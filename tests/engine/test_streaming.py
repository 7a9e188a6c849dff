"""Text as it comes: nothing is handed on that is taken back later."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from larder.engine.streaming import TextStream


def spoken(text: str, stops: Sequence[str] = ()) -> tuple[list[str], str]:
    """The pieces of a text whose tokens are bytes, and the text that was kept."""
    pieces = list[str]()
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"), stops, pieces.append)
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
def test_what_was_handed_on_is_what_is_kept(text: str, stops: Sequence[str], kept: str) -> None:
    pieces, told = spoken(text, stops)
    assert "".join(pieces) == told == kept
