"""Caches that hold what keys and values follow from answer as if nothing had been rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cache_stores import same_bits
from larder.cache import NewTokens, SequenceCache, recomputed_layers
from larder.core import BadParameter, CacheError, Mode, Plan, RecomputeSource, RecomputeSpec
from larder.models import BatchSegment, Decoder, wrap_model
from memory_counts import checked_counts
from model_runs import read_on, some_ids
from tiny_models import tiny


@pytest.fixture(autouse=True)
def counted_memory() -> Iterator[None]:
    with checked_counts():
        yield


VARIANTS = {
    "every": RecomputeSpec(),
    "one": RecomputeSpec(RecomputeSource.ONE, 1),
    "ids": RecomputeSpec(RecomputeSource.IDS),
}
EACH = pytest.mark.parametrize("variant", VARIANTS)
READ, NEAR, LAYERS = 24, 3, 3
IDS = some_ids(READ + 8)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def decoder(request) -> Decoder:
    return wrap_model(tiny(request.param, layers=LAYERS))


def bare(decoder: Decoder, variant: str) -> SequenceCache:
    return SequenceCache(decoder.spec, "rebuilt", rebuilding=VARIANTS[variant])


def evict(cache: SequenceCache) -> None:
    """All but the latest, and in each head another one of the others."""
    for layer in cache.spec.managed:
        if not cache.is_budgeted(layer):
            continue
        lengths, kept, start = cache.lengths()[layer.index], [], 0
        for head, length in enumerate(lengths):
            kept += [start + head, *range(start + length - NEAR, start + length)]
            start += length
        cache.apply(layer.index, Plan(torch.tensor(kept), (NEAR + 1,) * len(lengths)))


def filled(decoder: Decoder, variant: str, ids: tuple[int, ...] = IDS) -> SequenceCache:
    cache = bare(decoder, variant)
    for start in (0, 10):
        decoder.read([BatchSegment(cache, ids[start : start + 10])], Mode.APPEND)
        evict(cache)
    decoder.read([BatchSegment(cache, ids[20:READ])], Mode.APPEND)
    return cache


def full(decoder: Decoder, ids: tuple[int, ...]) -> torch.Tensor:
    """Logits over a cache that holds everything."""
    return read_on(decoder, SequenceCache(decoder.spec, "dense"), ids, len(ids))


@EACH
def test_logits_equal_those_of_a_full_cache(decoder, variant) -> None:
    cache, whole = filled(decoder, variant), full(decoder, IDS)
    for store in recomputed_layers(cache.layers):
        least = cache.cache_spec.rebuilding.depth
        assert all(len(own) == 16 for own in store.evicted) == (store.layer.index >= least)
    got = [read_on(decoder, cache, IDS[READ : READ + 3], 1)]
    got.append(read_on(decoder, cache, IDS[READ + 3 :], 5))  # and many at once
    assert torch.allclose(torch.cat(got), whole[READ:], atol=1e-4)


@EACH
def test_batches_and_scratch_passes_recompute_their_own_entries(decoder, variant) -> None:
    other = some_ids(READ + 8, seed=3)
    caches = [filled(decoder, variant), filled(decoder, variant, other), bare(decoder, variant)]
    texts = [IDS[READ : READ + 2], other[READ : READ + 3], IDS[:1]]
    before = [cache.state() for cache in caches]
    rows = [BatchSegment(cache, ids) for cache, ids in zip(caches, texts, strict=True)]
    got = decoder.forward_logits(rows, Mode.SCRATCH, range(6))
    assert all(same_bits(c.state(), b) for c, b in zip(caches, before, strict=True))
    assert torch.allclose(decoder.forward_logits(rows, Mode.APPEND, range(6)), got, atol=1e-4)
    whole = [
        full(decoder, IDS[: READ + 2])[READ:],
        full(decoder, other[: READ + 3])[READ:],
        full(decoder, IDS[:1]),
    ]
    assert torch.allclose(got, torch.cat(whole), atol=1e-4)


@EACH
@pytest.mark.parametrize("position", [0, 1])
def test_recompute_batched_with_a_full_cache_gives_full_logits(decoder, variant, position) -> None:
    other = some_ids(READ + 8, seed=3)
    plain = SequenceCache(decoder.spec, "dense")
    decoder.read([BatchSegment(plain, other[:READ])], Mode.APPEND)
    rows = [BatchSegment(filled(decoder, variant), IDS[READ : READ + 2])]
    rows.insert(position, BatchSegment(plain, other[READ : READ + 3]))
    got = decoder.forward_logits(rows, Mode.APPEND, range(5))
    whole = [full(decoder, IDS[: READ + 2])[READ:]]
    whole.insert(position, full(decoder, other[: READ + 3])[READ:])
    assert torch.allclose(got, torch.cat(whole), atol=1e-4)


@EACH
def test_recomputing_cache_round_trips_and_forks(three_layers, variant) -> None:
    decoder, cache = three_layers, filled(three_layers, variant)
    state = cache.state()
    back = SequenceCache.restore(decoder.spec, state, cache.meta())
    assert back.cache_spec == cache.cache_spec and same_bits(back.state(), state)
    fork = cache.fork()
    expected = read_on(decoder, cache, IDS[READ:], 1)
    for copy in (back, fork):
        assert torch.equal(read_on(decoder, copy, IDS[READ:], 1), expected)
    assert cache.nbytes == sum(
        t.untyped_storage().nbytes() for s in cache.layers for t in s.tensors()
    )


@EACH
def test_recomputing_cache_continues_after_truncation(three_layers, variant) -> None:
    decoder, cache = three_layers, filled(three_layers, variant)
    cache.truncate(READ - 2)
    got = read_on(decoder, cache, IDS[READ - 2 :], 4)
    whole = full(decoder, IDS)[READ - 2 :]
    assert torch.allclose(got, whole, atol=1e-4)


def failing(decoder: Decoder) -> Callable[[int, int, object], None]:
    def watch(row: int, layer: int, recorded: object) -> None:
        if layer == LAYERS - 1:
            raise KeyboardInterrupt

    return watch


@EACH
def test_interrupted_pass_leaves_no_hooks(three_layers, variant) -> None:
    decoder = three_layers
    cache, expected = filled(decoder, variant), filled(decoder, variant)
    with pytest.raises(KeyboardInterrupt):
        decoder.read([BatchSegment(cache, IDS[READ : READ + 2])], Mode.APPEND, failing(decoder))
    assert not any(module._forward_pre_hooks for module in decoder.module.modules())
    got, own = (read_on(decoder, each, IDS[READ:], 2) for each in (cache, expected))
    assert torch.allclose(got, own, atol=1e-5)


@EACH
def test_bytes_and_operations_are_counted(three_layers, variant) -> None:
    """By hand, for the tiny Llama: 64 numbers a residual, 4 query and 2 kv heads of 16."""
    cache, shape = filled(three_layers, variant), three_layers.shape
    tokens = sum(store.tokens for store in recomputed_layers(cache.layers))
    operations = sum(store.operations for store in recomputed_layers(cache.layers))
    three_layers.read([BatchSegment(cache, IDS[READ : READ + 1])], Mode.APPEND)
    gone = len({*torch.cat(recomputed_layers(cache.layers)[-1].evicted).tolist()})
    sources = sum(store.source.nbytes for store in recomputed_layers(cache.layers))
    per_token = {"every": 3 * 4 * shape.hidden, "one": 4 * shape.hidden, "ids": 4}[variant]
    assert sources == (READ + 1) * per_token
    reread = recomputed_layers(cache.layers)[-1].reread_tokens
    run = {"every": 3 * gone, "one": 3 * reread, "ids": 3 * reread}[variant]
    assert sum(s.tokens for s in recomputed_layers(cache.layers)) - tokens == run
    made = sum(s.operations for s in recomputed_layers(cache.layers)) - operations
    below = reread * (shape.projections + shape.mlp)
    again = reread * (shape.projections + shape.mlp + 2 * 4 * 16 * (reread + 1))
    assert (
        made
        == {"every": 3 * gone * shape.projections, "one": below + 2 * again, "ids": 3 * again}[
            variant
        ]
    )


def test_unsupported_recompute_operations_are_refused(three_layers) -> None:
    cache = filled(three_layers, "ids")
    with pytest.raises(CacheError, match="cannot be dropped: held='ids' reads the text again"):
        cache.drop_range(2, 4)
    every = filled(three_layers, "every")
    every.drop_range(2, 4)
    for store in recomputed_layers(every.layers):
        assert not {2, 3} & {*torch.cat(store.evicted).tolist()}
    with pytest.raises(CacheError, match="has no model to do so"):
        new = torch.zeros(4, 1, 16), torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
        every.attend(0, NewTokens(*new, torch.tensor([READ]), Mode.SCRATCH, (1,)))
    with pytest.raises(BadParameter, match="recompute.depth must be at least 1, got 0: the input"):
        RecomputeSpec(RecomputeSource.ONE, 0)
    one = filled(three_layers, "one")
    with pytest.raises(CacheError, match="Layer 0 lies before the residual of layer 1"):
        one.apply(0, Plan(torch.tensor([0, READ]), (1, 1)))
