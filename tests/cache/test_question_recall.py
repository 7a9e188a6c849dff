"""Questions read with recall: the union of the pages that their tokens find."""

from __future__ import annotations

import pytest
import torch

from builders import Tokens, a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, attend, extend
from larder.cache import TieredLayer
from larder.core import AppendKind, BadParameter, OffloadSpec
from larder.recall import Bounds, Flat
from references.cache.loop import Entry, attend_one

LAYER, COUNT, PAGE = a_layer(2, 2), 41, 4


def a_store(union: int | None, tokens: int = 8) -> TieredLayer:
    recall = Flat(tokens=tokens, page=PAGE, dense=0, union=union)
    store = TieredLayer(LAYER, layer_options(parking=OffloadSpec(recall)))
    append(store, draw(LAYER, COUNT))
    store.apply(a_plan([[COUNT - 1]] * 2, [COUNT] * 2))
    return store


def by_loop(new: Tokens, union: int) -> torch.Tensor:
    """Rows of a group name their best pages in turn, until there are enough for all of them."""
    held, outs = draw(LAYER, COUNT), torch.empty_like(new.queries)
    for head in range(LAYER.kv_heads):
        keys, values = held.keys[head], held.values[head]
        pages = [range(first, first + PAGE) for first in range(0, COUNT - 1, PAGE)]
        rows = []
        for q in range(new.queries.shape[1]):
            own = []
            for h in (2 * head, 2 * head + 1):
                best = [max(float(keys[n] @ new.queries[h, q]) for n in page) for page in pages]
                own.append(sorted(range(len(pages)), key=lambda p, b=best: -b[p]))
            turns = [own[i][rank] for rank in range(len(pages)) for i in (0, 1)]
            rows.append(list(dict.fromkeys(turns))[:2])
        chosen: list[int] = []
        for rank in (0, 1):
            chosen += [row[rank] for row in rows if row[rank] not in chosen]
        chosen = list(dict.fromkeys(chosen))[: union // PAGE]
        seen = [n for page in chosen for n in pages[page]] + [COUNT - 1]
        for h in (2 * head, 2 * head + 1):
            for q in range(new.queries.shape[1]):
                among = [Entry(0, new.keys[head, i], new.values[head, i]) for i in range(q + 1)]
                entries = [Entry(n, keys[n], values[n]) for n in seen]
                outs[h, q] = attend_one(new.queries[h, q], entries + among, LAYER.scaling)
    return outs


@pytest.mark.parametrize("union", [8, 16, 20])
def test_question_attends_to_the_union_of_its_tokens_pages(union) -> None:
    store, new = a_store(union), draw(LAYER, 3, COUNT, 1)
    store.expect(AppendKind.QUESTION)
    assert_close(extend(store, new), by_loop(new, union))
    assert store.fetcher.slot_bytes == 0  # those of a question are given back


@pytest.mark.parametrize("coming", [AppendKind.TEXT, AppendKind.STEP])
def test_texts_and_scratch_passes_attend_to_all_entries(coming) -> None:
    new = draw(LAYER, 3, COUNT, 1)
    store, full = a_store(4), a_store(None)
    store.expect(AppendKind.QUESTION)
    everything = attend(full, new)
    assert_close(attend(store, new), everything)
    store.expect(coming)
    assert_close(extend(store, new), everything)


@pytest.mark.parametrize("part", [Flat, Bounds])
def test_union_of_all_pages_is_exact(part) -> None:
    for count in (1, 5):
        new = draw(LAYER, count, COUNT, 2)
        expected = attend(a_store(None), new)
        recall = part(tokens=40, page=PAGE, dense=0, union=80)
        store = TieredLayer(LAYER, layer_options(parking=OffloadSpec(recall)))
        append(store, draw(LAYER, COUNT))
        store.apply(a_plan([[COUNT - 1]] * 2, [COUNT] * 2))
        store.expect(AppendKind.QUESTION)
        got = extend(store, new)
        if part is Flat or count > 1:
            assert_close(got, expected)


def test_text_token_attends_to_all_and_decode_step_recalls() -> None:
    new = draw(LAYER, 1, COUNT, 1)
    everything = attend(a_store(None), new)
    for coming in AppendKind:
        store = a_store(None)
        store.expect(coming)
        is_close = torch.allclose(extend(store, new), everything, atol=1e-5)
        assert is_close == (coming is not AppendKind.STEP)


@pytest.mark.parametrize("union", [0, 3, 6])
def test_union_of_partial_pages_is_refused(union) -> None:
    with pytest.raises(BadParameter, match=r"flat.union must be whole pages of 4 entries"):
        Flat(page=4, union=union)
