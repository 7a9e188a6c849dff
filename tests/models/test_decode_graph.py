"""Decode steps by captured graphs, on the stand-in that checks what a graph would repeat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from builders import a_plan
from larder.cache import PageArena, SequenceCache
from larder.core import CacheError, Ledger, Mode, ModelError
from larder.models import BatchSegment, DecodeGraphs, Decoder, GraphContractError
from larder.ops import AttentionBackend
from larder_bench.profiling.eager_capture import EagerCapture
from model_runs import read_on, some_ids
from tiny_models import tiny

PAGE = 8


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    with Decoder(tiny("llama")) as own:
        own.use_pages(PageArena(own.spec, 90, PAGE, AttentionBackend.GATHERED))
        yield own


def some_caches(decoder: Decoder, count: int = 3) -> list[SequenceCache]:
    caches = [SequenceCache(decoder.spec, "ragged") for _ in range(count)]
    for number, cache in enumerate(caches):
        read_on(decoder, cache, some_ids(12 + 5 * number, seed=number), 40)
    return caches


def evict(cache: SequenceCache) -> None:
    for layer in range(2):
        held = cache.lengths()[layer]
        kept = [range(2 + head, length) for head, length in enumerate(held)]
        cache.evict(layer, a_plan(kept, held))


@pytest.mark.extended
def test_replayed_steps_equal_forward_batches(decoder) -> None:
    """Batches that grow and shrink, with evictions between steps, in one captured size."""
    graphs = DecodeGraphs(decoder, EagerCapture(), width=8, batch_sizes=(2, 4))
    ours, theirs = some_caches(decoder), some_caches(decoder)
    for turn in range(24):
        rows = slice(0, 3 - turn % 2)
        ids = list(range(20 + turn, 23 + turn))[rows]
        segments = [BatchSegment(c, (i,)) for c, i in zip(theirs[rows], ids, strict=True)]
        expected = decoder.forward_logits(segments, Mode.APPEND, range(len(ids)))
        got = graphs.step(ours[rows], ids)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        if turn % 7 == 6:
            for caches in (ours, theirs):
                evict(caches[0])
    for one, other in zip(ours, theirs, strict=True):
        assert one.lengths() == other.lengths()
        assert one.next_position == other.next_position
        assert torch.equal(one.entries(1).positions, other.entries(1).positions)


def test_replays_use_the_same_output_memory(decoder) -> None:
    graphs = DecodeGraphs(decoder, EagerCapture(), width=8, batch_sizes=(4,))
    caches = some_caches(decoder)
    pointers = {graphs.step(caches, (5, 6, 7)).data_ptr() for _ in range(12)}
    assert len(pointers) == 1


def test_caches_outside_the_arena_are_refused(decoder) -> None:
    graphs, former = DecodeGraphs(decoder, EagerCapture(), width=8), some_caches(decoder, 1)
    decoder.use_pages(PageArena(decoder.spec, 90, PAGE, AttentionBackend.GATHERED))
    with_columns = SequenceCache(decoder.spec, "ragged", Ledger(("mass",)))
    for caches in (some_caches(decoder, 1), [with_columns]):
        with pytest.raises(CacheError, match="make other DecodeGraphs after another use_pages"):
            graphs.step(caches, (5,))
    assert graphs.step(former, (5,)).isfinite().all()


def test_padding_changes_no_cache(decoder) -> None:
    caches = some_caches(decoder)
    before = caches[2].state()
    graphs = DecodeGraphs(decoder, EagerCapture(), width=8, batch_sizes=(8,))
    for token in range(20, 30):
        graphs.step(caches[:2], (token, token))
    assert all(torch.equal(own, before[name]) for name, own in caches[2].state().items())


def test_call_with_other_addresses_is_detected() -> None:
    held: list[Tensor] = [torch.ones(3), torch.ones(3)]
    replay = EagerCapture().capture(lambda: held[0] * 2)
    assert replay().tolist() == [2.0] * 3
    held[0].add_(1)  # in place: what a graph reads
    assert replay().tolist() == [4.0] * 3
    held.reverse()
    with pytest.raises(GraphContractError, match="static buffers"):
        replay()


def test_call_with_another_number_or_operator_is_detected() -> None:
    numbers, own = [2], torch.ones(3)
    replay = EagerCapture().capture(lambda: own * numbers[0])
    numbers[0] = 3
    with pytest.raises(GraphContractError, match="was captured"):
        replay()
    steps = [1]
    replay = EagerCapture().capture(lambda: sum((own + own for _ in steps), own))
    steps.append(1)
    with pytest.raises(GraphContractError, match="operators"):
        replay()


def test_uncapturable_batches_and_models_are_refused(decoder) -> None:
    caches = some_caches(decoder)
    with pytest.raises(CacheError, match="more than the largest batch size, 2"):
        DecodeGraphs(decoder, EagerCapture(), 8, (1, 2)).step(caches, (5, 6, 7))
    with pytest.raises(CacheError, match="larger width"):
        DecodeGraphs(decoder, EagerCapture(), 1).step(caches, (5, 6, 7))
    with Decoder(tiny("llama")) as plain, pytest.raises(CacheError, match="use_pages"):
        DecodeGraphs(plain, EagerCapture(), 8)
    with Decoder(tiny("llama")) as plain, pytest.raises(CacheError, match="backend cpu reads"):
        plain.use_pages(PageArena(plain.spec, 20, PAGE))
        DecodeGraphs(plain, EagerCapture(), 8)
    with Decoder(tiny("gemma3")) as windowed, pytest.raises(ModelError, match="cannot be captured"):
        windowed.use_pages(PageArena(windowed.spec, 20, PAGE))
        DecodeGraphs(windowed, EagerCapture(), 8)
