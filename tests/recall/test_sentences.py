"""Sentences equal the loop: where they are cut, as they come, and how they are ranked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.recall.sentences import Sentences
from ranks import assert_best, keys_of
from references import sentences as loop
from tiers import Tier, pages_of

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


@settings(max_examples=30)
@given(
    texts=st.tuples(TEXTS, TEXTS),
    page=st.sampled_from([1, 4, 20]),
    step=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_it_equals_the_loop(texts, page, step, dtype, seed) -> None:
    numbers = [numbers_of(text) for text in texts]
    tier, index = Tier(LAYER, seed, dtype), Sentences(page=page).index(LAYER)
    while any(len(own) > length for own, length in zip(numbers, tier.lengths, strict=True)):
        left = zip(numbers, tier.lengths, strict=True)
        tier.grow([min(step, len(own) - length) for own, length in left])
        index.add(with_column(tier.entries(), numbers))
        for own, length, pages in zip(
            numbers, tier.lengths, pages_of(index, tier.lengths), strict=True
        ):
            assert [list(page) for _, page in pages] == loop.cut(own[:length], index.page)
    query, keys = tier.queries(), keys_of(tier)
    pages = [loop.cut(own, page) for own in numbers]
    for search, rank in ((index.find, loop.scores), (index.exact, loop.bests)):
        found = search(query, tier.entries(), 5).pages
        scores = [rank(own, keys[h // 2], pages[h // 2]) for h, own in enumerate(query.tolist())]
        assert_best(found, scores, 5)


def test_without_sentences_pages_are_of_entries_that_follow_each_other() -> None:
    tier, index = Tier(LAYER), Sentences(page=4).index(LAYER)
    for growth in ((3, 0), (6, 2)):
        tier.grow(growth)
        index.add(tier.entries())
    held = [[list(page) for _, page in pages] for pages in pages_of(index, tier.lengths)]
    assert held == [[[0, 1, 2, 3], [4, 5, 6, 7], [8]], [[0, 1]]]


def test_a_page_of_nothing_is_refused() -> None:
    with pytest.raises(BadParameter, match="sentences.page must be at least 1 entry, got 0"):
        Sentences(page=0)
