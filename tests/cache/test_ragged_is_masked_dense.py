"""Entries that are gone and entries that are masked out must give the same attention."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import a_layer, a_plan, draw, layer_options
from cache_stores import extend
from larder.cache import DenseLayer, RaggedLayer


@st.composite
def evictions(draw_from: st.DrawFn) -> tuple[int, int, int, list[list[int]]]:
    """K, R, entries held, and those that each head keeps: often few, sometimes none."""
    kv_heads, group = draw_from(st.integers(1, 4)), draw_from(st.integers(1, 3))
    held = draw_from(st.integers(1, 24))
    entry = st.sets(st.integers(0, held - 1)).map(sorted)
    kept = draw_from(st.lists(entry, min_size=kv_heads, max_size=kv_heads))
    return kv_heads, group, held, kept


@given(evictions(), st.integers(1, 6), st.integers(0, 9))
def test_ragged_attention_is_masked_dense_attention(case, count, seed) -> None:
    kv_heads, group, held, kept = case
    layer = a_layer(kv_heads, group)
    old, new = draw(layer, held, 0, seed), draw(layer, count, held, seed)
    store = RaggedLayer(layer, layer_options())
    store.append(old.keys, old.values, old.positions)
    store.apply(a_plan(kept, [held] * kv_heads))
    got = extend(store, new)

    keys = torch.cat([old.keys, new.keys], 1).repeat_interleave(group, 0)
    values = torch.cat([old.values, new.values], 1).repeat_interleave(group, 0)
    visible = torch.zeros(kv_heads, count, held + count, dtype=torch.bool)
    for head, entries in enumerate(kept):
        visible[head, :, entries] = True
    visible[:, :, held:] = torch.ones(count, count).tril().bool()
    logits = new.queries @ keys.transpose(1, 2) * layer.scaling
    logits = logits.masked_fill(~visible.repeat_interleave(group, 0), -torch.inf)
    torch.testing.assert_close(got, logits.softmax(-1) @ values, atol=2e-5, rtol=1e-4)


@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_ragged_equals_dense_without_evictions(kv_heads, group, blocks) -> None:
    layer = a_layer(kv_heads, group)
    stores = [kind(layer, layer_options()) for kind in (DenseLayer, RaggedLayer)]
    start = 0
    for size in blocks:
        new = draw(layer, size, start)
        dense, ragged = (extend(store, new) for store in stores)
        torch.testing.assert_close(ragged, dense, atol=2e-5, rtol=1e-4)
        start += size
