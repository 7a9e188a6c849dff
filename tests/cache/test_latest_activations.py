"""The latest queries of each layer go where their cache goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save

from builders import FORM_NAMES, a_layer, a_spec, draw, tiers_of
from cache_stores import same_bits
from larder.cache import NewTokens, SequenceCache, latest_queries_bytes
from larder.core import LatestQueries, Ledger, Mode
from tensor_memory import reachable_tensors, storage_bytes

LAYERS = (a_layer(2, 2), a_layer(1, 3, index=1))
SPEC = a_spec(*LAYERS)
HELD = 4
FORMS = [form for form in FORM_NAMES if form != "dense"]


def read(cache: SequenceCache, count: int) -> None:
    start = cache.next_position
    for layer in LAYERS:
        new = draw(layer, count, start)
        tensors = (new.queries, new.keys, new.values, new.positions)
        cache.attend(layer.index, NewTokens(*tensors, Mode.APPEND))
        cache.record_queries(layer.index, new.queries, new.positions)
    cache.advance(count)


def remembering(form: str = "ragged") -> SequenceCache:
    cache = SequenceCache(SPEC, form, Ledger(queries=HELD), **tiers_of(form))
    for count in (7, 2, 1):
        read(cache, count)
    return cache


def assert_latest(cache: SequenceCache, positions: list[int]) -> None:
    for layer in LAYERS:
        held = cache.latest.queries(layer.index)
        assert held is not None and held.positions.tolist() == positions
        expected = [query_of(layer.index, position) for position in positions]
        assert torch.equal(held.queries, torch.stack(expected, 1))


def query_of(layer: int, position: int) -> torch.Tensor:
    start, count = next((s, c) for s, c in ((0, 7), (7, 2), (9, 1)) if s <= position < s + c)
    return draw(LAYERS[layer], count, start).queries[:, position - start]


@pytest.mark.parametrize("form", FORMS)
def test_last_queries_are_held_and_counted(form) -> None:
    cache = remembering(form)
    assert_latest(cache, [6, 7, 8, 9])
    held = storage_bytes(reachable_tensors(cache.latest))
    assert cache.latest.nbytes == held == latest_queries_bytes(HELD, LAYERS, 4)
    assert cache.nbytes == held + sum(store.nbytes for store in cache.layers)


def through_a_file(cache: SequenceCache) -> SequenceCache:
    return SequenceCache.restore(SPEC, load(save(cache.state())), cache.meta())


def surrendered(cache: SequenceCache) -> SequenceCache:
    meta = cache.meta()
    handed = cache.release_state(torch.device("cpu"))
    assert cache.latest.queries(0) is None and not cache.latest.nbytes
    return SequenceCache.adopt(SPEC, handed, meta)


COPIES: dict[str, Callable[[SequenceCache], SequenceCache]] = {
    "fork": SequenceCache.fork,
    "restore": through_a_file,
    "surrender": surrendered,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("form", FORMS)
def test_copy_of_latest_queries_is_independent(form, way) -> None:
    twin, copy = remembering(form), COPIES[way](remembering(form))
    assert_latest(copy, [6, 7, 8, 9])
    assert same_bits(copy.state(), twin.state()) and copy.meta() == twin.meta()
    before = {name: tensor.clone() for name, tensor in copy.state().items()}
    further = copy.fork()
    read(further, 3)
    assert same_bits(copy.state(), before)
    held = further.latest.queries(1)
    assert held is not None and held.positions.tolist() == [9, 10, 11, 12]


def test_truncate_drops_latest_queries() -> None:
    cache = remembering()
    cache.truncate(8)
    assert_latest(cache, [6, 7])
    assert cache.latest.nbytes == latest_queries_bytes(2, LAYERS, 4)
    cache.truncate(8)
    assert_latest(cache, [6, 7])


def test_overwriting_held_queries_counts_as_one_plan_per_layer() -> None:
    """Queries that have left the window do not come back with `truncate`."""
    cache = remembering()
    before = cache.plans
    read(cache, 1)
    assert cache.plans == before + len(LAYERS)


def test_latest_queries_are_cut_by_count_and_by_position() -> None:
    new = draw(LAYERS[0], 5, 10)
    latest = LatestQueries(new.queries, new.positions)
    assert latest.before(12).positions.tolist() == [10, 11]
    assert latest.last(2).positions.tolist() == [13, 14]
    assert latest.last(2).extended(latest.before(11)).positions.tolist() == [13, 14, 10]
