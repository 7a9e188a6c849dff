"""A cache that was put aside comes back as it was."""

from __future__ import annotations

import pytest
import torch

from builders import a_plan
from cache_stores import same_bits
from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError
from larder.core.ledger import LOG_COUNT, Ledger
from larder.models.checkpoint import Checkpoint, put_aside
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment
from larder.models.kv_cost import KVSource
from larder.models.recompute import KVRecompute, ResidualStream
from model_runs import cuts, read_on, some_ids

READ, BLOCK = 45, 16
IDS = some_ids(READ)
MANNERS = {KVSource.IDS: (), KVSource.ONE: (1, 2), KVSource.EVERY: (0, 1, 2)}


def read(
    decoder: Decoder, cache: SequenceCache, layers=(0, 1, 2)
) -> tuple[KVRecompute, ResidualStream]:
    recompute, residuals = KVRecompute(decoder), ResidualStream(layers)
    for start, stop in cuts(READ, BLOCK):
        recompute.read(BatchSegment(cache, IDS[start:stop]), residuals)
    return recompute, residuals


def aside(decoder: Decoder, cache: SequenceCache, held: KVSource) -> tuple[Checkpoint, KVRecompute]:
    recompute, residuals = read(decoder, cache, MANNERS[held])
    return put_aside(held, cache, IDS, residuals, recompute), recompute


def ragged_after_eviction(decoder: Decoder, ledger: Ledger) -> tuple:
    """Heads that hold different entries, evicted while more was still to be read."""
    cache = SequenceCache(decoder.spec, "ragged", ledger)
    recompute, residuals = KVRecompute(decoder), ResidualStream(range(3))
    recompute.read(BatchSegment(cache, IDS[:32]), residuals)
    for layer in range(3):
        cache.apply(layer, a_plan([range(0, 32, 2 + layer), range(5, 29)], (32, 32)))
    recompute.read(BatchSegment(cache, IDS[32:]), residuals)
    return cache, recompute, residuals


@pytest.mark.parametrize("form", ["dense", "ragged"])
@pytest.mark.parametrize("held", MANNERS)
def test_what_comes_back_is_what_was_put_aside(three_layers, held, form) -> None:
    cache = SequenceCache(three_layers.spec, form)
    checkpoint, recompute = aside(three_layers, cache, held)
    state, again = cache.state(), checkpoint.cache(recompute, BLOCK)
    assert same_bits(again.state(), state)
    assert again.meta() == cache.meta()
    more = some_ids(5, seed=1)
    got, own = (read_on(three_layers, each, more, 1) for each in (again, cache))
    assert torch.equal(got, own)
    assert same_bits(checkpoint.cache(recompute, BLOCK).state(), state)


@pytest.mark.parametrize("held", [KVSource.IDS, KVSource.EVERY])
def test_layers_with_windows_come_back(adopted, held) -> None:
    decoder = adopted("gemma3")
    cache, recompute = SequenceCache(decoder.spec, "dense"), KVRecompute(decoder)
    residuals = ResidualStream(range(2) if held is KVSource.EVERY else ())
    for start, stop in cuts(READ, BLOCK):
        recompute.read(BatchSegment(cache, IDS[start:stop]), residuals)
    checkpoint = put_aside(held, cache, IDS, residuals, recompute)
    state, again = cache.state(), checkpoint.cache(recompute, BLOCK).state()
    assert all((state[name] - again[name]).abs().max() < 1e-5 for name in state)
    if held is KVSource.EVERY:
        assert len(checkpoint.residuals[0]) == len(state["0.positions"]) < READ


def test_what_a_policy_chose_comes_back(three_layers) -> None:
    cache, recompute, residuals = ragged_after_eviction(three_layers, Ledger((LOG_COUNT,)))
    own = cache.entries(0)
    cache.note(0, {LOG_COUNT: torch.rand(len(own.keys))})
    checkpoint = put_aside(KVSource.EVERY, cache, IDS, residuals, recompute)
    assert len(checkpoint.residuals[2]) < READ
    state, again = cache.state(), checkpoint.cache(recompute).state()
    assert state.keys() == again.keys()
    assert all((state[name] - again[name]).abs().max() < 1e-5 for name in state)


def test_bytes_are_less_only_where_the_manner_says_so(three_layers) -> None:
    found = {}
    for held in MANNERS:
        cache = SequenceCache(three_layers.spec, "dense")
        found[held] = aside(three_layers, cache, held)[0].nbytes
    entries, residual, position = 2 * 2 * 16 * 4, 64 * 4, 4
    assert found[KVSource.IDS] == READ * 4
    assert found[KVSource.ONE] == READ * (entries + residual + position)
    assert found[KVSource.EVERY] == READ * 3 * (residual + position)


@pytest.mark.parametrize("held", [KVSource.IDS, KVSource.ONE])
def test_what_is_read_again_cannot_leave_out_what_was_rejected(three_layers, held) -> None:
    cache, recompute, residuals = ragged_after_eviction(three_layers, Ledger())
    with pytest.raises(CacheError, match="A policy works on this cache"):
        put_aside(held, cache, IDS, residuals, recompute)


def test_a_plan_that_kept_everything_may_have_merged(three_layers) -> None:
    cache = SequenceCache(three_layers.spec, "ragged")
    recompute, residuals = read(three_layers, cache, (0,))
    cache.apply(1, a_plan([range(READ), range(READ)], (READ, READ)))
    with pytest.raises(CacheError, match="A policy works on this cache"):
        put_aside(KVSource.IDS, cache, IDS, residuals, recompute)


def test_keys_that_were_changed_are_noticed(three_layers) -> None:
    cache = SequenceCache(three_layers.spec, "ragged")
    recompute, residuals = read(three_layers, cache)
    cache.entries(1).keys[3] += 1
    with pytest.raises(CacheError, match="1.keys of this cache do not follow.*merged"):
        put_aside(KVSource.EVERY, cache, IDS, residuals, recompute)


@pytest.mark.parametrize(
    "held, layers, ids",
    [
        (KVSource.IDS, (), IDS[1:]),
        (KVSource.ONE, (), IDS),
        (KVSource.EVERY, (0, 2), IDS),
    ],
)
def test_what_is_lacking_is_named(three_layers, held, layers, ids) -> None:
    cache = SequenceCache(three_layers.spec, "dense")
    recompute, residuals = read(three_layers, cache, layers)
    with pytest.raises(CacheError, match="record all of them"):
        put_aside(held, cache, ids, residuals, recompute)


@pytest.mark.parametrize("held, form", [(KVSource.ENTRIES, "dense"), (KVSource.EVERY, "compact")])
def test_forms_that_cannot_be_rebuilt_are_refused(three_layers, held, form) -> None:
    cache = SequenceCache(three_layers.spec, form)
    recompute, residuals = read(three_layers, cache)
    with pytest.raises(CacheError, match="has no checkpoint"):
        put_aside(held, cache, IDS, residuals, recompute)
