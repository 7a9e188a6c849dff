"""Pairs of tokens by the C library equal the readable loop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder.ops.cpu import token_pairs as pairs

# Characters of one to four bytes.
TEXTS = st.text(st.sampled_from("ab\u2581\u00e9\U0001f600"), max_size=6)


def numbered(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


@given(st.lists(TEXTS, unique=True, max_size=60))
def test_pairs_equal_the_readable_loop(tokens: list[str]) -> None:
    assert pairs.token_pairs(numbered(tokens)) == pairs.list_pairs(numbered(tokens))


def test_longest_first_part_comes_first() -> None:
    vocabulary = numbered(["a", "ab", "b", "bb", "abb"])
    assert pairs.token_pairs(vocabulary) == ([0, 2, 1, 0], [2, 2, 2, 3])


def test_pairs_without_the_library_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = numbered(["x", "y", "xy", "yx", "xyx"])
    expected = pairs.token_pairs(vocabulary)
    monkeypatch.setattr(pairs, "c_library", lambda: None)
    assert pairs.token_pairs(vocabulary) == expected
