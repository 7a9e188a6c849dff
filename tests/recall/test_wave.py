"""The wave index equals the loop: its pages, its ranks, and what it estimates."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import HEAD_DIM, a_layer
from index_recall import assert_best, keys_of
from larder.core import BadParameter
from larder.recall import PendingMode, Wave
from references import wave as loop
from slow_tiers import Tier, pages_of

LAYER = a_layer(kv_heads=2, group=2)
SMALL = {"page": 4, "size": 3, "segment": 16, "update": 8, "iterations": 2, "estimated": 0.3}


@settings(max_examples=15)
@given(
    growths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=3),
    count=st.sampled_from([1, 3, 100]),
    pending=st.sampled_from(PendingMode),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(growths, count, pending, dtype, seed) -> None:
    whole, tier = Tier(LAYER, seed, dtype), Tier(LAYER, seed, dtype)
    lengths = [list(accumulate(own)) for own in zip(*growths, strict=True)]
    whole.grow([own[-1] for own in lengths])
    noise = torch.Generator().manual_seed(seed)  # no ties
    whole.keys = [(k + 0.1 * torch.randn(k.shape, generator=noise)).to(dtype) for k in whole.keys]
    index = Wave(**SMALL, pending=pending).index(LAYER)
    for now in zip(*lengths, strict=True):
        tier.keys = [keys[:length] for keys, length in zip(whole.keys, now, strict=True)]
        tier.values = [values[:length] for values, length in zip(whole.values, now, strict=True)]
        index.add(tier.entries())
    query, keys = tier.queries(), keys_of(tier)
    pages = [
        loop.pages_of(head, own, 4, 3, 16, 8, 2) for head, own in zip(keys, lengths, strict=True)
    ]
    held = [[list(page) for _, page in own] for own in pages_of(index, tier.lengths)]
    assert held == pages
    centroids = [loop.means(head, own) for head, own in zip(keys, pages, strict=True)]
    scores = loop.scores(query.tolist(), centroids, LAYER.scaling)
    left = [loop.pending(own, 16, 8) for own in lengths]
    if pending is PendingMode.EXACT:
        result = zip(scores, pages, left, strict=True)
        scores = [loop.with_pending(*each) for each in result]
    found = index.find(query, tier.entries(), count)
    assert_best(found.pages, scores, count)
    exact = loop.mass(query.tolist(), keys, pages, LAYER.scaling)
    if pending is PendingMode.EXACT:
        result = zip(exact, pages, left, strict=True)
        exact = [loop.with_pending(*each) for each in result]
    assert_best(index.exact(query, tier.entries(), count).pages, exact, count)
    wanted = math.ceil(0.3 * max(map(len, pages)))
    for head, own in enumerate(scores):
        result = [] if found.estimate is None else found.estimate.log_counts[head].tolist()
        stands = [n for n, log in enumerate(result) if log > -math.inf]
        assert len(stands) == max(min(len(own) - count, wanted), 0)
        if stands:
            check_estimates(found.estimate, head, stands, loop.ranked(own)[count:], pages, tier)


def check_estimates(estimate, head, stands, ranked, pages, tier) -> None:
    for n, page in zip(stands, ranked, strict=False):
        entries = pages[head][page]
        for result, rows in ((estimate.keys, tier.keys), (estimate.values, tier.values)):
            mean = loop.means(rows[head].float().tolist(), [entries])[0]
            assert result[head, n].tolist() == pytest.approx(mean, rel=1e-3, abs=1e-3)
        assert float(estimate.log_counts[head, n].exp()) == pytest.approx(len(entries))


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_pending_entries_are_never_missed(tokens) -> None:
    """And fit into half of what is fetched, so that clusters are fetched beside them."""
    part, tier = Wave(page=4, size=4, tokens=tokens), Tier(LAYER)
    index = part.index(LAYER)
    for growth in [(101, 90)] + [(1, 1)] * 40:
        tier.grow(growth)
        index.add(tier.entries())
        pages = index.find(tier.queries(), tier.entries(), part.pages).pages
        for head, length in enumerate(tier.lengths):
            done = int(index.state()["settled"][head, 0])
            fetched = set(index.contents(pages)[head].flatten().tolist()) - {-1}
            assert length - done < tokens // 2
            assert fetched >= set(range(done, length))
            assert fetched & set(range(done))


def test_text_that_is_shorter_than_an_update_has_no_clusters() -> None:
    tier, index = Tier(LAYER), Wave(tokens=4096).index(LAYER)
    tier.grow((1023, 400))
    index.add(tier.entries())
    assert index.state()["settled"].tolist() == [[0, 0], [0, 0]]
    pages = index.find(tier.queries(), tier.entries(), 256).pages
    assert int((index.contents(pages) >= 0).sum()) == 1423


def test_estimate_of_equal_keys_is_exact() -> None:
    tier = Tier(LAYER)
    tier.grow((24, 24))
    tier.keys = [keys[:3].repeat_interleave(8, 0) for keys in tier.keys]
    index = Wave(page=8, size=8, segment=24, update=24, estimated=1.0).index(LAYER)
    index.add(tier.entries())
    query = tier.queries()
    found = index.find(query, tier.entries(), 1)
    for h, own in enumerate(query.tolist()):
        k = h // 2
        keys, values = (side[k].tolist() for side in (tier.keys, tier.values))
        exact = loop.attended(own, keys, values, [0.0] * 24, LAYER.scaling)
        fetched = [n for n in index.contents(found.pages)[k].flatten().tolist() if n >= 0]
        about = found.estimate
        logs = [0.0] * len(fetched) + about.log_counts[k].tolist()
        keys = [keys[n] for n in fetched] + about.keys[k].tolist()
        values = [values[n] for n in fetched] + about.values[k].tolist()
        joined = loop.attended(own, keys, values, logs, LAYER.scaling)
        assert joined == pytest.approx(exact, abs=1e-5)
        assert len(joined) == HEAD_DIM


def test_zero_estimation_share_has_no_estimate() -> None:
    tier, index = Tier(LAYER), Wave(estimated=0.0).index(LAYER)
    tier.grow((100, 10))
    index.add(tier.entries())
    assert index.find(tier.queries(), tier.entries(), 2).estimate is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"page": 0}, "wave.page must be at least 1 entry, got 0"),
        ({"size": 0}, "wave.size must be at least 1, got 0"),
        ({"segment": 10}, "wave.segment must be at least wave.update, 1024, got 10"),
        ({"estimated": 1.5}, r"wave.estimated must be in \[0, 1\], got 1.5"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong, message) -> None:
    with pytest.raises(BadParameter, match=message):
        Wave(**wrong)
