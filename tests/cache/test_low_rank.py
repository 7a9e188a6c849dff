"""Low-rank layers: the sum of what plans rejected, and how it is attended to."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load, save

from builders import a_layer, a_plan, a_spec, draw, layer_options
from cache_stores import append, assert_close, attend, extend
from larder.cache import LowRankLayer, LowRankMaps, NewTokens, SequenceCache
from larder.core import CacheError, Folds, MissingWeights, Mode, Plan
from larder.ops import RANK, low_rank_attention, low_rank_state, state_bytes
from low_rank_weights import give_maps, some_maps
from references.cache.folding import Fold
from references.cache.low_rank import LowRankLoop

LAYER = a_layer(2, 2)
HELD = 13
CHOSEN = [[0, 2, 5, 7, 8, 9, 12], [3, 11]]
SPEC = a_spec(LAYER, a_layer(1, 3, window=6, index=1), a_layer(3, 1, index=2))


def a_low_rank(seed: int = 0) -> tuple[LowRankLayer, LowRankLoop]:
    maps = some_maps(LAYER, seed)
    store = LowRankLayer(LAYER, layer_options(), maps)
    return store, LowRankLoop(LAYER, maps)


def filled(chosen: list[list[int]] = CHOSEN) -> tuple[LowRankLayer, LowRankLoop]:
    """Thirteen tokens, of which a plan kept some."""
    store, loop = a_low_rank()
    for twin in (store, loop):
        append(twin, draw(LAYER, HELD))
    loop.keep(chosen)
    store.apply(a_plan(chosen, [HELD] * 2))
    return store, loop


def test_low_rank_state_hand_values() -> None:
    features = torch.tensor([[[1.0, 0.0], [2.0, 3.0]]])
    values = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    state = low_rank_state(features, values)
    assert state.tolist() == [[[21.0, 42.0, 3.0], [30.0, 60.0, 3.0]]]
    out, lse = low_rank_attention(torch.tensor([[[1.0, 1.0]], [[0.0, 2.0]]]), state)
    assert out.tolist() == [[[51 / 6, 102 / 6]], [[10.0, 20.0]]]
    assert lse.exp().tolist() == [[pytest.approx(6)], [pytest.approx(6)]]


def test_empty_state_has_no_weight() -> None:
    out, lse = low_rank_attention(torch.ones(1, 1, 2), torch.zeros(1, 2, 4))
    assert not out.any() and float(lse) < -80


def test_feature_map_hand_values() -> None:
    """One channel, one hidden unit, weights of 1, a scale of -3 and an interaction of 1."""
    one = torch.ones(1, 1, 1)
    maps = LowRankMaps(one, one, one, one, -3 * one, one)
    gelu = [0.5 * (1 + math.erf(1 / math.sqrt(2)))]
    gelu.append(gelu[0] * 0.5 * (1 + math.erf(gelu[0] / math.sqrt(2))))
    assert float(maps.queries(one)) == pytest.approx(gelu[1], rel=1e-6)
    assert float(maps.keys(one)) == pytest.approx(2 * 3 * gelu[1], rel=1e-6)
    assert not maps.keys(0 * one).any()


@pytest.mark.parametrize("sections", [(5,), (1,), (2, 3)])
def test_attention_equals_its_reference(sections) -> None:
    store, loop = filled()
    lengths = [offset for section in sections for offset in range(section)]
    new = draw(LAYER, len(lengths), HELD)
    assert_close(attend(store, new, sections), attend(loop, new, sections))
    loop.gone = [[], []]  # the comparison can fail
    with pytest.raises(AssertionError):
        assert_close(attend(store, new, sections), attend(loop, new, sections))


@pytest.mark.parametrize("carried", ["apply", "evict"])
def test_steps_blocks_and_plans_equal_the_reference(carried) -> None:
    store, loop = filled()
    start = HELD
    for size in (1, 4, 1, 1, 3):
        new = draw(LAYER, size, start)
        expected = attend(loop, new)
        assert_close(extend(store, new), expected)
        append(loop, new)
        start += size
        chosen = [list(range(1, length)) for length in store.lengths]
        getattr(store, carried)(a_plan(chosen, store.lengths))
        loop.keep(chosen)
    assert [len(own) for own in loop.gone] == [HELD - 7 + 5, HELD - 2 + 5]


@pytest.mark.parametrize("chosen", [[[], []], [[*range(HELD)], []]])
def test_head_without_entries_attends_to_its_state(chosen) -> None:
    store, loop = filled(chosen)
    new = draw(LAYER, 3, HELD)
    assert_close(attend(store, new), attend(loop, new))


def test_attention_without_evictions_is_exact() -> None:
    store, _ = filled([[*range(HELD)]] * 2)
    plain, _ = a_low_rank()
    append(plain, draw(LAYER, HELD))
    assert not store.low_rank_state.any()
    new = draw(LAYER, 4, HELD)
    assert torch.equal(attend(store, new), attend(plain, new))


def test_merged_entries_are_not_added_to_the_state() -> None:
    store, loop = a_low_rank()
    for twin in (store, loop):
        append(twin, draw(LAYER, HELD))
    chosen = [[*range(1, HELD)], [0, *range(3, HELD)]]
    plan = a_plan(chosen, [HELD] * 2)
    ones = torch.ones(2)
    target = int(plan.kept[0])
    plan = Plan(
        plan.kept,
        plan.lengths,
        Folds(torch.tensor([0, target]), torch.tensor([target] * 2), ones / 2, ones / 2),
    )
    store.apply(plan)
    loop.fold(chosen, [Fold((0, 0), (0, 1), 0.5, 0.5), Fold((0, 1), (0, 1), 0.5, 0.5)])
    assert [len(own) for own in loop.gone] == [0, 2]
    new = draw(LAYER, 3, HELD)
    assert_close(attend(store, new), attend(loop, new))


def test_truncate_and_drop_keep_the_state() -> None:
    store, loop = filled()
    before = store.low_rank_state.clone()
    extend(store, draw(LAYER, 4, HELD))
    store.truncate(HELD)
    store.drop_range(2, 6)
    assert torch.equal(store.low_rank_state, before)
    loop.heads = [[e for e in own if not 2 <= e.position < 6] for own in loop.heads]
    new = draw(LAYER, 2, HELD)
    assert_close(attend(store, new), attend(loop, new))


def test_forks_are_independent() -> None:
    store, _ = filled()
    fork, before = store.fork(), store.low_rank_state.clone()
    fork.apply(a_plan([[], []], fork.lengths))
    assert torch.equal(store.low_rank_state, before)
    assert not torch.equal(fork.low_rank_state, before)


def test_bytes_of_the_state_are_counted() -> None:
    store, _ = filled()
    assert store.own_tensors()[0].nbytes == LAYER.kv_heads * state_bytes(LAYER.head_dim)
    assert state_bytes(64) == RANK * 65 * 4
    assert store.nbytes >= sum(tensor.nbytes for tensor in store.tensors())


def a_sequence() -> SequenceCache:
    cache = SequenceCache(SPEC, "low_rank")
    read(cache, 14)
    for index in (0, 2):
        heads = SPEC.layers[index].kv_heads
        kept = [range(head, 14, 2 + head) for head in range(heads)]
        cache.apply(index, a_plan(kept, [14] * heads))
    return cache


def read(cache: SequenceCache, count: int) -> list[torch.Tensor]:
    start, outs = cache.next_position, []
    for layer in SPEC.layers:
        new = draw(layer, count, start)
        given = (new.queries, new.keys, new.values, new.positions)
        outs.append(cache.attend(layer.index, NewTokens(*given, Mode.APPEND)))
    cache.advance(count)
    return outs


@pytest.fixture
def maps() -> Iterator[None]:
    give_maps(SPEC)
    yield


@pytest.mark.usefixtures("maps")
def test_restored_caches_and_forks_continue_identically() -> None:
    cache = a_sequence()
    copies = [SequenceCache.restore(SPEC, load(save(cache.state())), cache.meta()), cache.fork()]
    for size in (3, 1, 5):
        expected = read(cache, size)
        for copy in copies:
            assert all(torch.equal(a, b) for a, b in zip(read(copy, size), expected, strict=True))


@pytest.mark.usefixtures("maps")
def test_layers_restored_from_one_state_are_independent() -> None:
    layer = a_sequence().layers[0]
    state = layer.state()
    before = {name: own.clone() for name, own in state.items()}
    first, second = (LowRankLayer.adopt(layer.layer, state) for _ in range(2))
    first.apply(a_plan([[0]] * len(first.lengths), first.lengths))
    assert not torch.equal(first.low_rank_state, second.low_rank_state)
    assert torch.equal(second.low_rank_state, before["low_rank.state"])
    assert all(torch.equal(own, before[name]) for name, own in state.items())


@pytest.mark.usefixtures("maps")
def test_state_of_other_features_is_refused() -> None:
    cache = a_sequence()
    state, meta = cache.state(), cache.meta()
    give_maps(SPEC, seed=1)
    with pytest.raises(CacheError, match="build the cache again"):
        SequenceCache.restore(SPEC, state, meta)


def test_model_without_features_names_the_training_command() -> None:
    with pytest.raises(MissingWeights, match="larder train less"):
        SequenceCache(SPEC, "low_rank")
    give_maps(a_spec(a_layer(3, 1), a_layer(3, 1, index=1)))
    with pytest.raises(CacheError, match="have shapes"):
        SequenceCache(SPEC, "low_rank")
