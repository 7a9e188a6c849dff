"""Attention of the tokens of a span to each other in both directions."""

from __future__ import annotations

import pytest
import torch

from larder.ops import causal_attention, lookahead_attention, merge_attention
from references.ops import attention as loop

SPANS = ((1, 4), (6, 7), (7, 10))
TOKENS = 11


def sees(query: int, key: int, window: int | None) -> bool:
    """True if a token sees another one, by definition."""
    within = any(start <= query < stop and start <= key < stop for start, stop in SPANS)
    return (key <= query or within) and (window is None or query - key < window)


@pytest.mark.parametrize("window", [None, 3])
def test_lookahead_merged_with_causal_equals_their_union(window: int | None) -> None:
    queries, keys, values = (torch.randn(heads, TOKENS, 16) for heads in (4, 2, 2))
    states = [
        causal_attention(queries, keys, values, 0.3, (TOKENS,), window),
        lookahead_attention(queries, keys, values, 0.3, SPANS),
    ]
    got = merge_attention(*zip(*states, strict=True))
    visible = [[k for k in range(TOKENS) if sees(q, k, window)] for q in range(TOKENS)]
    heads = list(zip(keys, values, strict=True))
    expected = loop.attend(queries, heads, 0.3, visible)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
