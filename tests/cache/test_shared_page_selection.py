"""Layers use the pages that another one found, where the same entries are parked in both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from builders import a_layer, a_spec, draw
from cache_stores import assert_close
from larder.cache import NewTokens, SequenceCache
from larder.core import BadParameter, Ledger, Mode, OffloadSpec, Plan, RecallPart
from larder.recall import Dci, Flat, Votes, Wave
from references.cache.loop import Entry, attend_one

LAYER = a_layer(2, 2)
LAYERS, NEAR, TOKENS = 6, 4, 40
PARTS = {
    "flat": Flat(tokens=8, page=4, dense=1, layers=3),
    "dci": Dci(tokens=8, page=4, dense=1, layers=3),
    "votes": Votes(tokens=6, dense=1, layers=3),
}
EACH = pytest.mark.parametrize("name", PARTS)


def a_cache(
    recall: RecallPart, odd: int | None = None, more: int = 0
) -> tuple[SequenceCache, list[list[Entry]]]:
    """Forty tokens a layer, all but the latest of each head parked.

    And all entries of the first kv head of each layer.

    Args:
        odd: a layer that keeps the first token as well, and gives up none or `more` of the others.
    """
    spec = a_spec(*(replace(LAYER, index=i) for i in range(LAYERS)))
    cache, ever = SequenceCache(spec, "tiered", Ledger(), parking=OffloadSpec(recall)), []
    for i, layer in enumerate(spec.layers):
        new = draw(layer, TOKENS, 0, i)
        cache.attend(i, NewTokens(new.queries, new.keys, new.values, new.positions, Mode.APPEND))
        pairs = zip(new.keys[0], new.values[0], strict=True)
        ever.append([Entry(index, *pair) for index, pair in enumerate(pairs)])
    cache.advance(TOKENS)
    for i in range(1, LAYERS):
        latest = torch.arange(TOKENS - NEAR + (more if i == odd else 0), TOKENS)
        own = torch.cat([torch.arange(int(i == odd)), latest])
        cache.apply(i, Plan(torch.cat([own, own + TOKENS]), (len(own),) * 2))
    return cache, ever


def step(cache: SequenceCache, seed: int = 90) -> list[Tensor]:
    """Output of each layer for one more token."""
    outs, index = [], cache.next_position
    for i, layer in enumerate(cache.spec.layers):
        new = draw(layer, 1, index, seed + i)
        outs.append(
            cache.attend(
                i, NewTokens(new.queries, new.keys, new.values, new.positions, Mode.APPEND)
            )
        )
    cache.advance(1)
    return outs


def numbers(cache: SequenceCache, layer: int) -> list[int]:
    """Of the entries that the index of a layer found for the first kv head."""
    choice = cache.tiers[layer].fetcher.selection
    return sorted(n for n in choice.numbers[0].flatten().tolist() if n >= 0)


@EACH
def test_follower_layers_attend_to_the_leaders_pages(name) -> None:
    cache, ever = a_cache(PARTS[name])
    outs = step(cache)
    leaders = [None if tier.leader is None else tier.leader.layer.index for tier in cache.tiers]
    assert leaders == [None, None, 1, 1, None, 4]
    for i, leader in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4)):
        new = draw(LAYER, 1, TOKENS, 90 + i)
        own = Entry(TOKENS, new.keys[0, 0], new.values[0, 0])
        near = range(TOKENS - NEAR, TOKENS)
        among = [ever[i][n] for n in (*numbers(cache, leader), *near)] + [own]
        expected = attend_one(new.queries[0, 0], among, LAYER.scaling)
        assert_close(outs[i][0, 0], expected)
    searched = [tier.fetcher.shared_index.is_used for tier in cache.tiers]
    assert searched == [False, True, False, False, True, False]


@EACH
def test_unused_indexes_are_not_saved(name) -> None:
    cache, _ = a_cache(PARTS[name])
    step(cache)
    state = cache.state()
    assert not [key for key in state if key.startswith(("2.index", "3.index", "5.index"))]
    back = SequenceCache.restore(cache.spec, state, cache.meta())
    fork = cache.fork()
    expected = step(cache, 7)
    for copy in (back, fork):
        for got, wanted in zip(step(copy, 7), expected, strict=True):
            assert_close(got, wanted)
        assert not copy.tiers[2].fetcher.shared_index.is_used


@pytest.mark.parametrize("more", [0, 1])
def test_layer_with_other_offloaded_entries_searches_itself(more) -> None:
    cache, _ = a_cache(PARTS["flat"], 2, more)
    step(cache)
    searched = [tier.fetcher.shared_index.is_used for tier in cache.tiers]
    assert searched == [False, True, True, False, True, False]
    cache.drop_range(3, 5)  # and what is left of both still differs
    step(cache)
    assert [tier.fetcher.shared_index.is_used for tier in cache.tiers] == searched


def test_page_selection_of_truncated_tokens_is_not_reused() -> None:
    """The leader's pages of a text that is gone are no pages of the text that came in its place."""
    cache, _ = a_cache(PARTS["flat"])
    step(cache)
    cache.truncate(20)
    for i in range(LAYERS):
        new = draw(LAYER, 20, 20, 50 + i)
        cache.attend(i, NewTokens(new.queries, new.keys, new.values, new.positions, Mode.APPEND))
    cache.advance(20)
    assert not any(tier.fetcher.shared_index.is_used for tier in cache.tiers)
    step(cache)
    assert numbers(cache, 1) and cache.tiers[2].fetcher.selection is None


def test_shared_selection_reduces_index_bytes() -> None:
    many, _ = a_cache(Dci(tokens=8, page=4, dense=1))
    few, _ = a_cache(PARTS["dci"])
    step(many)
    step(few)
    assert few.nbytes < many.nbytes


def test_unshareable_indexes_refuse_several_layers() -> None:
    with pytest.raises(BadParameter, match=r"wave.layers must be 1, got 2"):
        Wave(layers=2)
    with pytest.raises(BadParameter, match=r"dci.layers must be at least 1, got 0"):
        Dci(layers=0)
