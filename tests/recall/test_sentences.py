"""Sentences equal the loop: how they are ranked and taken, and what a step searches with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer
from index_recall import assert_best, keys_of
from larder.core import BadParameter, Entries, FetchMode
from larder.recall import Sentences, SentencesIndex
from references import sentences as loop
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)
# Lengths of sentences; each is one number, below zero at the last token.
TEXTS = st.lists(st.integers(1, 9), min_size=1, max_size=10)


def numbers_of(lengths: list[int]) -> list[float]:
    numbers: list[float] = []
    for length in lengths:
        first = float(len(numbers) + 1)
        numbers += [first] * (length - 1) + [-first]
    return numbers


def with_column(entries: Entries, numbers: list[list[float]]) -> Entries:
    column = torch.full((len(entries.keys),), torch.nan)
    for head, own in enumerate(numbers):
        column[entries.rows(head)] = torch.tensor(own[: entries.lengths[head]])
    return replace(entries, columns={"sentence": column})


def grown(numbers: list[list[float]], step: int, tier: Tier) -> SentencesIndex:
    index = Sentences().index(LAYER)
    while any(len(own) > length for own, length in zip(numbers, tier.lengths, strict=True)):
        left = zip(numbers, tier.lengths, strict=True)
        tier.grow([min(step, len(own) - length) for own, length in left])
        index.add(with_column(tier.entries(), numbers))
    return index


def newest(position: int, number_before: float = 0.0) -> Entries:
    """A fast tier of the newest token and the one before it."""
    keys = torch.zeros(4, LAYER.head_dim)
    positions = torch.tensor([position - 1, position] * 2).int()
    column = torch.tensor([number_before, 0.0] * 2)
    return Entries(keys, keys, positions, (0, 2), (2, 2), {"sentence": column})


@settings(max_examples=30)
@given(
    texts=st.tuples(TEXTS, TEXTS),
    step=st.integers(1, 30),
    count=st.sampled_from([1, 5, 100]),
    is_late=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(texts, step, count, is_late, dtype, seed) -> None:
    numbers = [numbers_of(text) for text in texts]
    if is_late:  # an entry of the first sentence may leave the fast tier after all others
        numbers = [[*own[1:], own[0]] for own in numbers]
    tier = Tier(LAYER, seed, dtype)
    index = grown(numbers, step, tier)
    query, keys = tier.queries(), keys_of(tier)
    found = index.find(query, tier.entries(), count)
    assert not found.attends_all
    for head, pages in enumerate(found.pages.tolist()):
        group = query[2 * head : 2 * head + 2].tolist()
        wanted = loop.ranked(group, keys[head], numbers[head])[:count]
        assert [page for page in pages if page >= 0] == wanted
    scores = [loop.products(query[2 * k : 2 * k + 2].tolist(), keys[k]) for k in range(2)]
    assert_best(index.exact(query, tier.entries(), count).pages, scores, count)


def test_step_queries_with_the_mean_of_its_sentence() -> None:
    numbers, tier = [numbers_of([3, 4, 5])] * 2, Tier(LAYER)
    index = grown(numbers, 5, tier)
    ends, queries = [False, False, True, False, False], [tier.queries() for _ in range(5)]
    for step, query in enumerate(queries):
        ended = step > 0 and ends[step - 1]
        index.observe_step(query, newest(20 + step, -7.0 if ended else 7.0))
        found = index.find(query, tier.entries(), 6)
        rows = [loop.asked([q[h].tolist() for q in queries], ends, step) for h in range(4)]
        assert found.attends_all == rows[0][1] == (step in (0, 3))
        for head, pages in enumerate(found.pages.tolist()):
            group = [mean for mean, _ in rows[2 * head : 2 * head + 2]]
            assert pages == loop.ranked(group, keys_of(tier)[head], numbers[head])[:6]


def test_sentence_starts_after_a_prefilled_text() -> None:
    tier = Tier(LAYER)
    index = grown([numbers_of([3, 4])] * 2, 7, tier)
    for position, is_whole in ((9, True), (10, False), (15, True), (16, False)):
        index.observe_step(tier.queries(), newest(position, 5.0))
        assert index.find(tier.queries(), tier.entries(), 2).attends_all == is_whole


def test_sentence_ranking_hand_values() -> None:
    """Sentences (1, 0), (1, 0) and (0, 3): their mean keys are (1, 0) and (0, 3)."""
    layer = a_layer(kv_heads=1, group=1)
    keys = torch.zeros(3, layer.head_dim)
    keys[0, 0] = keys[1, 0] = 1.0
    keys[2, 1] = 3.0
    column = {"sentence": torch.tensor([1.0, -1.0, 3.0])}
    entries = Entries(keys, keys, torch.arange(3).int(), (0,), (3,), column)
    index = Sentences().index(layer)
    index.add(entries)
    query = torch.zeros(1, layer.head_dim)
    query[0, :2] = torch.tensor([2.0, 1.0])  # products 2 and 3
    assert index.find(query, entries, 2).pages.tolist() == [[2, 0]]
    query[0, 1] = 0.5  # products 2 and 1.5
    assert index.find(query, entries, 2).pages.tolist() == [[0, 1]]


def test_without_a_column_consecutive_entries_are_a_sentence() -> None:
    tier = Tier(LAYER)
    tier.grow((70, 10))
    index = Sentences().index(LAYER)
    index.add(tier.entries())
    query = tier.queries()
    found = index.find(query, tier.entries(), 70).pages.tolist()
    for head, length in enumerate(tier.lengths):
        numbers = [n // 32 + 1.0 for n in range(length)]
        group = query[2 * head : 2 * head + 2].tolist()
        wanted = loop.ranked(group, keys_of(tier)[head], numbers)
        assert [page for page in found[head] if page >= 0] == wanted


def test_prefetching_is_refused() -> None:
    with pytest.raises(BadParameter, match="sentences.fetch must be in_turn, got ahead"):
        Sentences(fetch=FetchMode.AHEAD)
