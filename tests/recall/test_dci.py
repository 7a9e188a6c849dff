"""The tree of keys: its parts equal the loop, and its search finds what there is."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import a_layer
from larder.core import BadParameter, Entries, Variant
from larder.ops import dci as ops
from larder.ops.cpu import dci as fast
from larder.recall import Dci, DciIndex, LevelAssigner, _dci_build, dci
from references import dci as loop
from slow_tiers import Tier, pages_of
from without_kernels import reference

LAYER = a_layer(kv_heads=2, group=2)
SMALL = Dci(page=4, first=0.2, further=0.3)
TABLE = {
    (5000, 0.01): [4936, 50, 11, 3],
    (5000, 0.03): [4816, 145, 30, 7, 2],
    (20000, 0.01): [19751, 198, 40, 9, 2],
    (20000, 0.03): [19275, 579, 116, 24, 5, 1],
    (128000, 0.01): [126416, 1265, 254, 51, 11, 3],
    (128000, 0.03): [123369, 3702, 741, 149, 30, 7, 2],
}


def grown(part: Dci, lengths: list[tuple[int, int]], seed: int = 0) -> tuple[Tier, DciIndex]:
    tier = Tier(LAYER, seed)
    index = DciIndex(part, LAYER)
    for each in lengths:
        tier.grow(each)
        index.add(tier.entries())
    return tier, index


@pytest.mark.parametrize(("count", "first"), TABLE)
def test_level_sizes_equal_the_table(count, first) -> None:
    targets, _ = LevelAssigner(first, 0.2, False, (0,)).initial_levels(count, 0)
    assert np.bincount(targets).tolist() == TABLE[count, first]


@given(count=st.integers(0, 400), first=st.sampled_from([0.02, 0.1, 1 / 3]))
def test_levels_equal_the_reference(count, first) -> None:
    targets, _ = LevelAssigner(first, 0.25, False, (0,)).initial_levels(count, 0)
    assert targets.tolist() == loop.levels(count, first, 0.25)


def test_levels_at_random_have_the_ratio() -> None:
    levels = LevelAssigner(0.1, 0.25, True, (3, 1))
    targets, _ = levels.initial_levels(40000, 0)
    sizes = np.bincount(targets)
    assert 3700 < sizes[1:].sum() < 4300
    assert 900 < sizes[2:].sum() < 1100
    assert ((levels.initial_levels(10000, 0)[0] > 0) == (targets[:10000] > 0)).all()
    assert ((levels.initial_levels(10000, 1)[0] > 0) != (targets[:10000] > 0)).any()


@given(seed=st.integers(0, 2**31))
def test_lifted_distance_orders_as_the_product(seed) -> None:
    drawn = np.random.default_rng(seed).normal(size=(13, 5)).tolist()
    query, keys = drawn[0], drawn[1:]
    radius = 1.05 * max(loop.dot(key, key) ** 0.5 for key in keys)
    near = sorted(keys, key=lambda k: loop.distance(loop.asked(query), loop.lifted(k, radius)))
    assert near == sorted(keys, key=lambda k: -loop.dot(query, k))


@settings(max_examples=10)
@given(count=st.sampled_from([1, 2, 17, 60, 90]), seed=st.integers(0, 2**31))
def test_built_tree_equals_its_reference(count, seed) -> None:
    tier = Tier(LAYER, seed)
    tier.keys = [torch.randn(count, LAYER.head_dim) for _ in range(2)]
    tier.values = tier.keys
    index = DciIndex(SMALL, LAYER)
    index.add(tier.entries())
    direction = index.tensors()[-1].tolist()
    for head, pages in enumerate(pages_of(index, tier.lengths)):
        keys = tier.keys[head].double().tolist()
        radius = 1.05 * max(loop.dot(key, key) ** 0.5 for key in keys)
        ours = {tuple(sorted(contents)) for _, contents in pages}
        assert ours == loop.pages(keys, radius, direction, 4, (0.2, 0.3))


@settings(max_examples=15)
@given(
    lengths=st.lists(st.tuples(*[st.sampled_from([0, 1, 5, 33, 70])] * 2), min_size=1, max_size=4),
    variant=st.sampled_from(Variant),
    seed=st.integers(0, 2**31),
)
def test_search_without_limit_is_exact(lengths, variant, seed) -> None:
    tier, index = grown(Dci(page=4, first=0.2, beam=10**6, variant=variant), lengths, seed)
    query = tier.queries()
    found, wanted = (s(query, tier.entries(), 5).pages for s in (index.find, index.exact))
    assert listed(found) == listed(wanted)


def listed(pages: Tensor) -> list[list[int]]:
    return [[page for page in row if page >= 0] for row in pages.tolist()]


def coarse(numbers: Tensor) -> Tensor:
    """In quarters: products have no rounding, whatever the order in which a machine adds them."""
    return (4 * numbers).round() / 4


def readable(index: DciIndex, tier: Tier, query: Tensor, count: int) -> Tensor:
    entries, forest = tier.entries(), index.forest
    layout = np.array(entries.starts), forest.tree, forest.bases, forest.levels
    beams = np.full(2, 3)
    form = (coarse(query), coarse(entries.keys), *layout, beams, count)
    assert all(
        np.array_equal(one, other)
        for one, other in zip(reference(ops.search)(*form), fast.search(*form), strict=True)
    )
    return torch.from_numpy(fast.search(*form)[0])


@settings(max_examples=10)
@given(
    lengths=st.lists(st.tuples(*[st.sampled_from([0, 1, 30, 70])] * 2), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_search_kernel_equals_the_python_form(lengths, seed) -> None:
    tier, index = grown(SMALL, lengths, seed)
    assert readable(index, tier, tier.queries(), 6).shape == (4, 6)


@pytest.mark.parametrize("part", [SMALL, Dci(page=1, first=0.3), Dci(variant=Variant.CODE, page=2)])
def test_insert_kernel_equals_the_python_form(part, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, index = grown(part, [(60, 40)])
    twin = copy.deepcopy(index)
    tier.grow((50, 30))
    index.add(tier.entries())
    assert index.forest.built.tolist() == [60, 40]
    with monkeypatch.context() as patch:
        patch.setattr(fast, "supports", lambda keys: False)
        twin.add(tier.entries())
    ours, theirs = index.state(), twin.state()
    assert all(torch.allclose(ours[name].double(), theirs[name].double()) for name in ours)


@pytest.mark.extended
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_half_precision_keys_are_found(dtype) -> None:
    tier = Tier(LAYER, 0, dtype)
    index = DciIndex(Dci(page=4, first=0.2, beam=10**6), LAYER)
    for lengths in ((60, 40), (20, 20)):
        tier.grow(lengths)
        index.add(tier.entries())
    query = tier.queries()
    found, wanted = (s(query, tier.entries(), 5).pages for s in (index.find, index.exact))
    assert torch.equal(found, wanted)


@pytest.mark.extended
def test_tree_built_by_search_equals_that_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, index = grown(SMALL, [(200, 150)])
    monkeypatch.setattr(_dci_build, "EXACT_LEVEL_ENTRIES", 0)
    _, searched = grown(Dci(page=4, first=0.2, further=0.3), [(200, 150)])
    pairs = [set(map(lambda p: p[1], pages)) for pages in pages_of(index, tier.lengths)]
    found = [set(map(lambda p: p[1], pages)) for pages in pages_of(searched, tier.lengths)]
    assert pairs == found


@pytest.mark.extended
def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dci_build, "EXACT_LEVEL_ENTRIES", 0)
    lengths = [(900, 700), (300, 200)]
    tier, alone = grown(SMALL, lengths)
    monkeypatch.setattr(fast, "MAX_SERIAL_FLOATS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _, shared = grown(SMALL, lengths)
        query = tier.queries()
        arguments = [index.search(query, tier.entries(), 12)[0] for index in (alone, shared)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(value, shared.state()[name]) for name, value in alone.state().items())
    assert torch.equal(*arguments)


def parent_of(index: DciIndex, head: int, entry: int) -> int:
    """Entry that another one of level 0 is below."""
    tree = index.forest.head(head)
    for cell in range(1, index.forest.counts[head, 1]):
        page = tree["firsts"][cell]
        while page >= 0:
            if tree["tiers"][page] == 0 and entry in tree["members"][page]:
                return int(tree["centers"][cell])
            page = tree["nexts"][page]
    raise AssertionError(f"Entry {entry} is in no cell.")


@pytest.mark.parametrize("is_readable", [False, True])
def test_keys_outside_the_sphere_are_below_the_nearest_entries(
    is_readable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, index = grown(SMALL, [(60, 40)])
    square = float(index.forest.squares[0])
    monkeypatch.setattr(fast, "supports", lambda keys: not is_readable)
    for count, scale in ((4, 3.0), (4, 1.0), (4, 30.0), (8, 1.0)):
        tier.grow((count, 0), scale=scale)
        index.add(tier.entries())
    assert index.forest.built.tolist() == [60, 40] and float(index.forest.squares[0]) == square
    keys, radius = tier.keys[0].double().tolist(), square**0.5
    points = [loop.lifted(key, radius) for key in keys]
    assert sum(loop.dot(key, key) > square for key in keys) >= 6
    below = [n for n in range(60, 80) if (index.forest.entries_of(0, index.counts[0]) == n).any()]
    centers = index.forest.head(0)["centers"][1 : index.forest.counts[0, 1]].tolist()
    for entry in sorted({*below} - {*centers}):
        near = parent_of(index, 0, entry)
        upper = [c for c in centers if c < entry and is_on_level_one(index, c)]
        nearest = min(loop.distance(points[entry], points[c]) for c in upper)
        assert loop.distance(points[entry], points[near]) == pytest.approx(nearest)


def is_on_level_one(index: DciIndex, entry: int) -> bool:
    tree = index.forest.head(0)
    pages = np.nonzero((index.forest.entries_of(0, index.counts[0]) == entry).any(1))[0]
    return bool((tree["tiers"][pages] == 1).all())


def entry_recall(index: DciIndex, tier: Tier, count: int) -> float:
    """Share of the best keys of each query that are in the pages found for it."""
    source, shares = torch.Generator().manual_seed(1), list[float]()
    for _ in range(40):
        query = torch.randn(LAYER.query_heads, LAYER.head_dim, generator=source)
        ranked, _ = index.search(query, tier.entries(), count)
        held = index.contents(ranked.clamp(min=0)).flatten(1)
        for head, own in enumerate(query):
            best = (tier.keys[head // LAYER.group] @ own).topk(count).indices
            shares.append(float(torch.isin(best, held[head]).float().mean()))
    return sum(shares) / len(shares)


def test_long_keys_are_found_as_in_a_tree_built_of_all() -> None:
    part = Dci(page=4, first=0.2, further=0.3, beam=4)
    tier, index = grown(part, [(1200, 1200)])
    for scale in (1.5, 1.0, 4.0, 1.0):
        for _ in range(50):
            tier.grow((1, 1), scale=scale)
            index.add(tier.entries())
    assert index.forest.built.tolist() == [1200, 1200]
    built = DciIndex(part, LAYER)
    built.add(tier.entries())
    assert entry_recall(index, tier, 8) > entry_recall(built, tier, 8) - 0.02


def test_doubled_entries_rebuild_the_tree() -> None:
    tier, index = grown(SMALL, [(60, 40), (59, 40)])
    assert index.forest.built.tolist() == [60, 40]
    tier.grow((1, 70))
    index.add(tier.entries())
    assert index.forest.built.tolist() == [120, 150]


def test_steps_build_the_trees_of_a_model_one_at_a_time() -> None:
    layers = [replace(LAYER, index=number) for number in range(3)]
    indexes, tier = [DciIndex(SMALL, layer) for layer in layers], Tier(LAYER)
    tier.grow((60, 60))
    for index in indexes:
        index.add(tier.entries())
    before, most = [60] * 6, 0
    for _ in range(60, 181):
        tier.grow((1, 1))
        for index in indexes:
            index.add(tier.entries())
        built = [n for index in indexes for n in index.forest.built.tolist()]
        most = max(most, sum(a != b for a, b in zip(before, built, strict=True)))
        before = built
    assert most == 1 and min(before) >= 120


def test_full_page_is_split() -> None:
    tier, index = grown(Dci(page=4, first=0.01), [(3, 0)])
    tier.keys[0] = torch.cat([tier.keys[0], tier.keys[0][:2] * 0.5])
    tier.values[0] = tier.keys[0]
    index.add(tier.entries())
    assert sorted(len(held) for _, held in pages_of(index, tier.lengths)[0]) == [2, 3]


def test_search_for_all_pages_is_complete() -> None:
    tier, index = grown(Dci(page=4, first=0.2, beam=1), [(200, 30)])
    found = index.find(tier.queries(), tier.entries(), max(index.counts)).pages
    assert [sorted(set(row) - {-1}) for row in found.tolist()] == [
        list(range(count)) for count in index.counts
    ]


def test_digests_stay_below_sixteen_bytes_a_key() -> None:
    layer = a_layer(kv_heads=2, group=2)
    tier, index = Tier(layer), DciIndex(Dci(), layer)
    tier.grow((6000, 5000))
    index.add(tier.entries())
    assert index.nbytes / 11000 < 16
    for lengths in ((0, 0), (1, 0), (700, 20)):
        tier.grow(lengths)
        index.add(tier.entries())
        assert index.nbytes == sum(tensor.nbytes for tensor in index.tensors())
    restored = Dci().adopt(layer, index.state())
    assert restored.nbytes == sum(tensor.nbytes for tensor in restored.tensors())


@pytest.mark.parametrize("wrong", [{"page": 0}, {"first": 0.7}, {"further": -0.1}, {"beam": -1}])
def test_parameters_are_checked(wrong) -> None:
    with pytest.raises(BadParameter, match=f"dci.{next(iter(wrong))} must"):
        Dci(**wrong)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "head_dim", [24, *(pytest.param(d, marks=pytest.mark.slow) for d in (16, 64, 600))]
)
@pytest.mark.parametrize("variant", [Variant.LARDER, Variant.CODE])
def test_c_kernel_equals_numba(dtype, head_dim, variant) -> None:
    layer = replace(a_layer(kv_heads=2, group=3), head_dim=head_dim)
    source = torch.Generator().manual_seed(head_dim)
    keys = coarse(torch.randn(2 * 300, head_dim, generator=source)).to(dtype)
    index = DciIndex(Dci(page=20, variant=variant, first=0.2), layer)
    index.add(Entries(keys, keys, torch.arange(300).repeat(2).int(), (0, 300), (300, 300)))
    forest, query = index.forest, coarse(torch.randn(6, head_dim, generator=source))
    layout = np.array([0, 300]), forest.tree, forest.bases, forest.levels, np.array([4, 7])
    for one, other in zip(
        fast.search(query, keys, *layout, 9),
        fast.numba_search(query, keys, *layout, 9),
        strict=True,
    ):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("form", ["c", "numba", "readable"])
def test_entries_stay_on_their_level_where_a_beam_finds_cells_without_entries(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow beam takes cells that were opened since the tree was built, with nothing below."""
    part = Dci(page=2, first=0.5, further=0.5)
    monkeypatch.setattr(dci, "PARENT_BEAM", 1)
    states = []
    for is_reference in (True, False):
        tier, index = grown(part, [(200, 150)])
        with monkeypatch.context() as patch:
            if is_reference or form == "readable":
                patch.setattr(fast, "supports", lambda keys: False)
            elif form == "numba":
                patch.setattr(fast, "insertion_library", lambda head_dim: None)
            for _ in range(30):
                tier.grow((5, 4))
                index.add(tier.entries())
        for head, length in enumerate(tier.lengths):
            pages = pages_of(index, tier.lengths)[head]
            assert sorted(e for _, held in pages for e in held) == list(range(length))
        forest = index.forest
        for head in range(2):
            pages, cells = (int(count) for count in forest.counts[head])
            members = forest.tree.members[int(forest.bases[0, head]) :][:pages]
            tiers = forest.tree.tiers[int(forest.bases[0, head]) :][:pages]
            assert members[tiers > 0].max() < cells
        states.append(index.state())
    ours, theirs = states
    assert all(torch.equal(ours[name], theirs[name]) for name in ("members", "nexts"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [24, pytest.param(600, marks=pytest.mark.extended)])
@pytest.mark.parametrize("variant", Variant)
def test_c_insertion_equals_numba(dtype, head_dim, variant, monkeypatch) -> None:
    layer = replace(a_layer(kv_heads=2, group=1), head_dim=head_dim)
    tier = Tier(layer, 0, dtype)
    index = DciIndex(Dci(page=4, variant=variant, first=0.2, further=0.3), layer)
    tier.grow((300, 200))
    index.add(tier.entries())
    monkeypatch.setattr(_dci_build, "EXACT_LEVEL_ENTRIES", 0)
    twin = copy.deepcopy(index)
    for scale in (1.0, 5.0):
        tier.grow((40, 60), scale)
        index.add(tier.entries())
        with monkeypatch.context() as patch:
            patch.setattr(fast, "insertion_library", lambda head_dim: None)
            twin.add(tier.entries())
    tier.grow((400, 400))
    for each, has_library in ((index, True), (twin, False)):
        with monkeypatch.context() as patch:
            if not has_library:
                patch.setattr(fast, "insertion_library", lambda head_dim: None)
            each.add(tier.entries())
    ours, theirs = index.state(), twin.state()
    assert index.forest.built.tolist() == [780, 720]
    assert all(torch.allclose(ours[n].double(), theirs[n].double(), atol=1e-4) for n in ours)
