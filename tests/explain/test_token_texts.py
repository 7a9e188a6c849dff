"""Cutting a text into tokens loses and repeats nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder.core import BadParameter
from larder.explain import token_texts


def test_pieces_begin_where_tokens_do() -> None:
    assert token_texts("Just so.", (0, 4, 7)) == ("Just", " so", ".")


def test_split_character_goes_to_its_last_token() -> None:
    assert token_texts("naïve", (0, 2, 2, 3)) == ("na", "", "ï", "ve")


def test_skipped_text_goes_to_the_token_before() -> None:
    assert token_texts("  a b", (2, 4)) == ("  a ", "b")


def test_empty_text_has_empty_pieces() -> None:
    assert token_texts("", ()) == ()
    assert token_texts("", (0, 0)) == ("", "")


@pytest.mark.extended
@given(st.text(min_size=1), st.data())
def test_pieces_join_to_the_text(text: str, data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.integers(0, len(text)), min_size=1).map(sorted))
    pieces = token_texts(text, starts)
    assert "".join(pieces) == text
    assert len(pieces) == len(starts)


@pytest.mark.parametrize("starts", [(2, 1), (-1, 0), (0, 9)])
def test_starts_ascend_within_the_text(starts: tuple[int, ...]) -> None:
    with pytest.raises(BadParameter, match=r"must ascend within \[0, 3\]"):
        token_texts("abc", starts)


def test_text_needs_a_token() -> None:
    with pytest.raises(BadParameter, match="3 characters, got none"):
        token_texts("abc", ())
