"""Votes equal the loop, and stand as long as the query stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer
from index_recall import assert_best, built, keys_of
from larder.core import BadParameter
from larder.recall import Votes
from references import votes as loop

LAYER = a_layer(kv_heads=2, group=2)


@settings(max_examples=25)
@given(
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    shift=st.integers(0, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(lengths, shift, dtype, seed) -> None:
    tier, index = built(Votes(), LAYER, [lengths], seed, dtype)
    entries, query = tier.entries(), tier.queries()
    positions = entries.positions.clone()
    positions[entries.rows(1)] += shift
    entries = replace(entries, positions=positions)
    held = [entries.head_positions(head).tolist() for head in range(2)]
    scores = loop.scores(query.tolist(), keys_of(tier), held, LAYER.scaling)
    for search in (index.find, index.exact):
        assert_best(search(query, entries, 6).pages, scores, 6)


def test_all_heads_select_the_same_tokens() -> None:
    tier, index = built(Votes(), LAYER, [(40, 40)])
    pages = index.find(tier.queries(), tier.entries(), 6).pages
    assert torch.equal(pages[0], pages[1])


@pytest.mark.parametrize("threshold", [0.5, 0.9, 1.0])
def test_selection_is_reused_for_similar_queries(threshold) -> None:
    tier, index = built(Votes(threshold=threshold), LAYER, [(60, 60)])
    entries, first, other = tier.entries(), tier.queries(), tier.queries()
    before = index.find(first, entries, 4).pages
    for step in range(11):
        query = first + step / 10 * (other - first)
        stands = threshold < 1 and loop.cosine(query.tolist(), first.tolist()) >= threshold
        if not stands:
            break
        assert torch.equal(index.find(query, entries, 4).pages, before)
    exact = index.exact(query, entries, 4).pages
    assert torch.equal(index.find(query, entries, 4).pages, exact)
    assert torch.equal(index.find(query, entries, 5).pages, index.exact(query, entries, 5).pages)


def test_incomplete_selection_is_renewed() -> None:
    tier, index = built(Votes(threshold=-1.0), LAYER, [(3, 30)])
    query = tier.queries()
    index.find(query, tier.entries(), 6)
    tier.grow((20, 0))
    index.add(tier.entries())
    assert int((index.find(query, tier.entries(), 6).pages >= 0).sum()) == 12


def test_threshold_below_minus_one_is_refused() -> None:
    with pytest.raises(BadParameter, match="votes.threshold must be at least -1, got -2"):
        Votes(threshold=-2.0)
