"""Searching keys: both forms equal each other and the loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer
from larder.ops import search
from larder.ops.cpu import search as fast
from references import flat as loop
from slow_tiers import Tier
from without_kernels import reference


@settings(max_examples=30)
@given(
    lengths=st.tuples(st.integers(0, 90), st.integers(1, 90)),
    page=st.sampled_from([1, 5, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_page_max_scores_equal_their_reference(lengths, page, dtype, seed) -> None:
    tier = Tier(a_layer(), seed, dtype)
    tier.grow(lengths)
    query, entries = tier.queries(), tier.entries()
    for form in (search.page_max_scores, reference(search.page_max_scores), fast.page_max_scores):
        found = form(query, entries.keys, *entries.layout, page)
        for row, bests in enumerate(found.tolist()):
            wanted = loop.bests(query[row].tolist(), tier.keys[row // 2].tolist(), page)
            assert bests[: len(wanted)] == pytest.approx(wanted, abs=1e-4)
            assert set(bests[len(wanted) :]) <= {-torch.inf}


@pytest.mark.extended
def test_results_do_not_depend_on_threads() -> None:
    tier = Tier(a_layer())
    tier.grow((9000, 5000))
    query, entries = tier.queries(), tier.entries()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shared = fast.page_max_scores(query, entries.keys, *entries.layout, 16)
        ranked = fast.top_rows(shared, 50)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(shared, fast.page_max_scores(query, entries.keys, *entries.layout, 16))
    assert torch.equal(ranked, reference(search.top_rows)(shared, 50))


def test_results_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(a_layer())
    tier.grow((95, 40))
    query, entries = tier.queries(), tier.entries()
    whole = reference(search.page_max_scores)(query, entries.keys, *entries.layout, 16)
    monkeypatch.setattr(search, "MAX_SCORES", 70)
    parts = reference(search.page_max_scores)(query, entries.keys, *entries.layout, 16)
    assert torch.allclose(whole, parts)


@given(
    rows=st.lists(
        st.lists(st.sampled_from([-torch.inf, -1.0, 0.0, 2.0]), min_size=7, max_size=7),
        min_size=1,
        max_size=3,
    ),
    count=st.integers(0, 9),
)
def test_top_rows_equal_their_reference(rows, count) -> None:
    scores = torch.tensor(rows)
    found = search.top_rows(scores, count)
    assert torch.equal(found, reference(search.top_rows)(scores, count))
    for row, numbers in zip(rows, found.tolist(), strict=True):
        real = [number for number in numbers if number >= 0]
        finite = [value for value in row if value != -torch.inf]
        assert real == loop.ranked(row, len(finite))[:count]


@given(
    lists=st.lists(st.lists(st.integers(-1, 5), min_size=4, max_size=4), min_size=4, max_size=4),
    count=st.integers(0, 9),
)
def test_interleaved_equals_its_reference(lists, count) -> None:
    ranked = torch.tensor(lists)
    found = search.interleaved(ranked, 2, count)
    assert torch.equal(found, reference(search.interleaved)(ranked, 2, count))
    for group, numbers in zip((lists[:2], lists[2:]), found.tolist(), strict=True):
        columns = [page for position in zip(*group, strict=True) for page in position if page >= 0]
        wanted = list(dict.fromkeys(columns))[:count]
        assert numbers == wanted + [-1] * (len(numbers) - len(wanted))


def test_page_max_scores_of_any_entries_hand_values() -> None:
    scores = torch.tensor(
        [[1.0, 5.0, 2.0], [0.0, -1.0, 4.0], [7.0, 8.0, -torch.inf], [1.0, 2.0, 3.0]]
    )
    page_of = torch.tensor([[1, 0, 1], [0, 0, -1]])
    found = search.scatter_page_max(scores, page_of, 2).tolist()
    lost = -torch.inf
    assert found == [[5.0, 2.0], [-1.0, 4.0], [8.0, lost], [2.0, lost]]
