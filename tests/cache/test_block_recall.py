"""Blocks of text read with recall: the pages found by the mean query of a block."""

from __future__ import annotations

import pytest
import torch

from builders import Tokens, a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, attend, extend
from larder.cache import TieredLayer
from larder.core import AppendKind, OffloadSpec, PrefillRecall
from larder.recall import Votes
from references import votes as loop
from references.cache.loop import Entry, attend_one

LAYER, COUNT = a_layer(2, 2), 41


def a_store(prefill: PrefillRecall, tokens: int = 8) -> TieredLayer:
    parking = OffloadSpec(Votes(tokens=tokens, dense=0, prefill=prefill))
    store = TieredLayer(LAYER, layer_options(parking=parking))
    append(store, draw(LAYER, COUNT))
    store.apply(a_plan([[COUNT - 1]] * 2, [COUNT] * 2))
    return store


def by_loop(new: Tokens, count: int) -> torch.Tensor:
    """All heads and queries of the block take the same entries, by the votes of its mean query."""
    held, outs = draw(LAYER, COUNT), torch.empty_like(new.queries)
    parked = [held.keys[head, : COUNT - 1].tolist() for head in range(LAYER.kv_heads)]
    mean = new.queries.mean(1).tolist()
    chosen = loop.chosen(mean, parked, [list(range(COUNT - 1))] * 2, LAYER.scaling, count)
    for h in range(LAYER.query_heads):
        head = h // LAYER.group
        keys, values = held.keys[head], held.values[head]
        entries = [Entry(n, keys[n], values[n]) for n in [*chosen[head], COUNT - 1]]
        for q in range(new.queries.shape[1]):
            among = [Entry(0, new.keys[head, i], new.values[head, i]) for i in range(q + 1)]
            outs[h, q] = attend_one(new.queries[h, q], entries + among, LAYER.scaling)
    return outs


@pytest.mark.parametrize("coming", [AppendKind.TEXT, AppendKind.QUESTION])
@pytest.mark.parametrize(("tokens", "block"), [(8, 5), (3, 1), (COUNT, 4)])
def test_block_attends_to_pages_of_its_mean_query(coming, tokens, block) -> None:
    store, new = a_store(PrefillRecall.RECALLED, tokens), draw(LAYER, block, COUNT, 1)
    store.expect(coming)
    assert_close(extend(store, new), by_loop(new, tokens))


def test_block_is_exact_with_full_or_disabled_recall() -> None:
    new = draw(LAYER, 4, COUNT, 1)
    stores = a_store(PrefillRecall.RECALLED, COUNT), a_store(PrefillRecall.EXACT, 3)
    for store in stores:
        store.expect(AppendKind.TEXT)
    some = a_store(PrefillRecall.RECALLED, 3)
    some.expect(AppendKind.TEXT)
    outs = [extend(store, new) for store in (*stores, some)]
    assert_close(outs[0], outs[1])
    assert not torch.allclose(outs[2], outs[1], atol=1e-3)


def test_scratch_attention_covers_all_entries() -> None:
    new = draw(LAYER, 4, COUNT, 1)
    some, exact = a_store(PrefillRecall.RECALLED, 3), a_store(PrefillRecall.EXACT, 3)
    for store in (some, exact):
        store.expect(AppendKind.TEXT)
    assert_close(attend(some, new), attend(exact, new))


def test_mean_query_recall_hand_values() -> None:
    """Two queries of a block whose mean is (1, 1): the key (1, 1) wins, which neither prefers."""
    keys = [[[2.0, -2.0], [-2.0, 2.0], [1.0, 1.0]]]
    mean = [[(3.0 - 1.0) / 2, (-1.0 + 3.0) / 2]]
    assert loop.chosen(mean, keys, [[0, 1, 2]], 1.0, 1) == [[2]]
    for query in ([3.0, -1.0], [-1.0, 3.0]):
        assert loop.chosen([query], keys, [[0, 1, 2]], 1.0, 1) != [[2]]
