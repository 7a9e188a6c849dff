"""Contract of every recall index with its cache, whatever it does inside."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer, small_parameters
from larder.core import RECALLS, BadParameter, CacheError, RecallIndex, RecallPart
from slow_tiers import Tier, pages_of

LAYER = a_layer(kv_heads=2, group=2)
# Sizes around nothing, one page, several pages, and twice what was there.
GROWTHS = st.lists(
    st.tuples(*[st.sampled_from([0, 1, 2, 15, 16, 17, 40, 90])] * 2), min_size=1, max_size=4
)
# Where the defaults are for texts that are longer than those of tests.
# Entries that come later join a cluster, whose centroid does not go to them: so many are looked at.
# A sentence that stands out is fetched from its first entry on.
ENOUGH = {"clusters": 60, "sentences": 64, "a2ats": 60, "positionless": 60}
NEEDS = {"graph": "usearch"}  # packages that may be missing
PARTS = pytest.mark.parametrize("name", sorted(RECALLS.builtin_names()))
LOOPS = {
    name: vars(import_module(f"references.{name}")) for name in sorted(RECALLS.builtin_names())
}


def part(name: str) -> RecallPart:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    return RECALLS.load(name)(**small_parameters(name))


def asked(tier: Tier, wanted: RecallPart) -> torch.Tensor | None:
    """The latest queries, for parts that want them."""
    if not wanted.observed:
        return None
    return torch.stack([tier.queries() for _ in range(wanted.observed)], 1)


def grown(name: str, growths: list[tuple[int, int]], seed: int = 0) -> tuple[Tier, RecallIndex]:
    wanted, tier = part(name), Tier(LAYER, seed)
    index = wanted.index(LAYER)
    for growth in growths:
        tier.grow(growth)
        index.add(tier.entries(), asked(tier, wanted))
    return tier, index


@PARTS
@settings(max_examples=15)
@given(growths=GROWTHS, seed=st.integers(0, 2**31))
def test_every_entry_is_in_one_page_and_versions_follow_contents(name, growths, seed) -> None:
    wanted, tier = part(name), Tier(LAYER, seed)
    index = wanted.index(LAYER)
    before = pages_of(index, tier.lengths)
    for growth in growths:
        tier.grow(growth)
        index.add(tier.entries(), asked(tier, wanted))
        after = pages_of(index, tier.lengths)
        for head, length in enumerate(tier.lengths):
            held = [entry for _, contents in after[head] for entry in contents]
            assert sorted(held) == list(range(length))
            for (old, had), (new, has) in zip(before[head], after[head], strict=False):
                assert (old == new) == (had == has)
        before = after


@PARTS
@settings(max_examples=15)
@given(growths=GROWTHS, count=st.sampled_from([1, 3, 12]), seed=st.integers(0, 2**31))
def test_results_are_valid_pages(name, growths, count, seed) -> None:
    tier, index = grown(name, growths, seed)
    for search in (index.find, index.exact):
        found = search(tier.queries(), tier.entries(), count).pages
        assert len(found) in (LAYER.kv_heads, LAYER.query_heads)
        assert found.shape[1] <= count
        group = len(found) // LAYER.kv_heads
        for row, pages in enumerate(found.tolist()):
            real = [page for page in pages if page >= 0]
            assert pages == real + [-1] * (len(pages) - len(real))
            assert len(set(real)) == len(real)
            assert all(page < index.counts[row // group] for page in real)
            assert bool(real) == (tier.lengths[row // group] > 0)
        assert index.contents(found).shape == (*found.shape, index.page)
        assert bool((index.contents(found)[found < 0] == -1).all())


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if "found" in loop])
@settings(max_examples=25)
@given(growths=GROWTHS, count=st.sampled_from([1, 4, 100]), seed=st.integers(0, 2**31))
def test_search_equals_its_reference(name, growths, count, seed) -> None:
    tier, wanted = Tier(LAYER, seed), part(name)
    index, queries = wanted.index(LAYER), (4 * tier.queries()).round() / 4
    for growth in growths:
        tier.grow(growth)
        tier.keys = [(4 * head).round() / 4 for head in tier.keys]  # so that sums are exact
        index.add(tier.entries(), asked(tier, wanted))
    keys = [head.tolist() for head in tier.keys]
    pages = index.find(queries, tier.entries(), count).pages.tolist()
    expected = LOOPS[name]["found"](wanted, queries.tolist(), keys, count)
    assert [[page for page in row if page >= 0] for row in pages] == expected


def test_index_without_a_contract_reference_has_its_own_tests() -> None:
    folder = Path(__file__).parent
    without = [name for name, loop in LOOPS.items() if "found" not in loop]
    assert [name for name in without if not (folder / f"test_{name}.py").is_file()] == []


@PARTS
@settings(max_examples=10)
@given(growths=GROWTHS, seed=st.integers(0, 2**31))
def test_restored_index_answers_and_grows_identically(name, growths, seed) -> None:
    tier, index = grown(name, growths, seed)
    wanted = part(name)
    twin = wanted.adopt(LAYER, {key: value.clone() for key, value in index.state().items()})
    for growth in ((0, 0), (17, 3), (120, 40)):
        tier.grow(growth)
        queries = asked(tier, wanted)
        index.add(tier.entries(), queries)
        twin.add(tier.entries(), queries)
        assert pages_of(index, tier.lengths) == pages_of(twin, tier.lengths)
        query = tier.queries()
        one, other = (each.find(query, tier.entries(), 3) for each in (index, twin))
        assert torch.equal(one.pages, other.pages)
        assert same(index.state(), twin.state())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(torch.equal(one[key], other[key]) for key in one)


@PARTS
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_keys_are_refused_unchanged(name, value) -> None:
    tier, index = grown(name, [(40, 20)])
    state = {key: tensor.clone() for key, tensor in index.state().items()}
    tier.grow((4, 4))
    tier.keys[1][22, 3] = value
    with pytest.raises(CacheError, match="entry 22 of kv head 1"):
        index.add(tier.entries(), asked(tier, part(name)))
    assert same(index.state(), state)


@PARTS
def test_missing_entries_are_detected(name) -> None:
    tier, index = grown(name, [(40, 20)])
    tier.keys[0], tier.values[0] = tier.keys[0][:30], tier.values[0][:30]
    with pytest.raises(CacheError, match="has 40 entries of kv head 0"):
        index.add(tier.entries(), asked(tier, part(name)))


@PARTS
def test_index_bytes_are_counted(name) -> None:
    _, small = grown(name, [(40, 20)])
    _, large = grown(name, [(4000, 2000)])
    held = [sum(tensor.nbytes for tensor in index.tensors()) for index in (small, large)]
    stated = sum(tensor.nbytes for tensor in large.state().values())
    assert 0 < held[0] <= held[1]
    assert stated <= held[1] + 4096


@PARTS
def test_outstanding_key_is_found(name) -> None:
    tier, index = grown(name, [(300, 200)])
    query = tier.queries()
    for head in range(LAYER.kv_heads):
        mean = query[head * LAYER.group : (head + 1) * LAYER.group].mean(0)
        tier.grow([int(other == head) for other in range(LAYER.kv_heads)])
        tier.keys[head][-1] = 3 * mean
    index.add(tier.entries(), asked(tier, part(name)))
    for search in (index.find, index.exact):
        held = index.contents(search(query, tier.entries(), ENOUGH.get(name, 12)).pages)
        for row, entries in enumerate(held.flatten(1).tolist()):
            assert tier.lengths[row * LAYER.kv_heads // len(held)] - 1 in entries


@PARTS
def test_more_pages_never_cover_less(name) -> None:
    tier, index = grown(name, [(150, 60), (40, 9)])
    query, weights = tier.queries(), []
    for h, own in enumerate(query):
        weights.append(torch.softmax(own @ tier.keys[h // LAYER.group].T, 0))
    for search in (index.find, index.exact):
        before = torch.zeros(LAYER.query_heads)
        for count in (1, 2, 3, 5, 8, 13, 30, 60, 200):
            held = index.contents(search(query, tier.entries(), count).pages).flatten(1)
            sets = held.repeat_interleave(LAYER.query_heads // len(held), 0)
            covered = [w[s[s >= 0]].sum() for w, s in zip(weights, sets, strict=True)]
            assert bool((torch.stack(covered) >= before - 1e-6).all())
            before = torch.stack(covered)
        if search == index.exact or name != "graph":  # a walk may end before it saw all
            assert torch.allclose(before, torch.ones(LAYER.query_heads), atol=1e-5)


@PARTS
def test_search_is_deterministic(name) -> None:
    found = []
    for _ in range(2):
        tier, index = grown(name, [(150, 60), (40, 9)])
        found.append(index.find(tier.queries(), tier.entries(), 5).pages)
    assert torch.equal(*found)


@PARTS
@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"dense": -1}])
def test_parameters_are_checked(name, wrong) -> None:
    with pytest.raises(BadParameter, match=f"{name}."):
        RECALLS.load(name)(**wrong)


@PARTS
def test_empty_page_is_refused(name) -> None:
    part = RECALLS.load(name)
    if "page" in {field.name for field in fields(part)}:
        with pytest.raises(BadParameter, match=f"{name}.page must be at least 1 entry, got 0"):
            part(page=0, tokens=16)


@PARTS
def test_first_zero_key_is_indexed(name) -> None:
    tier, index = Tier(LAYER), RECALLS.load(name)().index(LAYER)
    tier.grow((1, 0), scale=0.0)
    index.add(tier.entries())
    assert [[numbers for _, numbers in head] for head in pages_of(index, tier.lengths)] == [
        [(0,)],
        [],
    ]


def test_tier_grows_by_the_given_counts() -> None:
    tier = Tier(LAYER)
    for total in accumulate([3, 4]):
        tier.grow((total, 1))
    assert tier.lengths == (10, 2)
