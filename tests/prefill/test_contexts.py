"""Several contexts of one prompt: read apart, found again, blended or side by side."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import BadParameter, Mode, ModelError, UsageError
from larder.models import BatchSegment, Decoder
from larder.models.tiny import tiny
from larder.prefill import (
    Blended,
    ChunkMemory,
    ChunkSource,
    ContextReuse,
    ContextText,
    NoChunks,
    Parallel,
    PeakMemoryMeter,
    PrefillReader,
    PrefillSequence,
    run_steps,
)
from larder.session import Policy, empty_cache
from model_runs import some_ids

PREFIX, SUFFIX, ASKED = some_ids(4, seed=1), some_ids(3, seed=2), some_ids(5, seed=3)
ONE, TWO, THREE = some_ids(9, seed=4), some_ids(6, seed=5), some_ids(7, seed=6)
TEXT = ContextText(PREFIX, (ONE, TWO, THREE), SUFFIX)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny("llama", layers=4))


def read(
    decoder: Decoder, spelling: str, text: ContextText = TEXT, source: ChunkSource | None = None
) -> tuple[SequenceCache, ContextReuse]:
    policy = Policy.parse(spelling)
    policy = policy.with_sizes(policy.budget.tokens or len(text.ids), None)
    planner = policy.planner
    tokens, quotas = policy.budget.tokens or 0, dict[int, int]()
    if "unlimited" not in spelling:
        layers = tuple(layer.index for layer in decoder.spec.managed)
        quotas = planner.quotas(tokens, len(text.ids), layers, {})
    reader = PrefillReader(decoder, planner, tokens, quotas, PeakMemoryMeter())
    lane = PrefillSequence(empty_cache(policy, decoder.spec), {})
    steps = policy.schedule.context_steps(reader, lane, text, source or NoChunks())
    return lane.cache, run_steps(steps)


def logits(decoder: Decoder, cache: SequenceCache) -> Tensor:
    segment = BatchSegment(cache, ASKED)
    return decoder.forward_logits([segment], Mode.SCRATCH, range(len(ASKED)))


def full(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    cache = SequenceCache(decoder.spec, "dense")
    decoder.read([BatchSegment(cache, tuple(ids))], Mode.APPEND)
    return logits(decoder, cache)


def test_recomputing_everything_is_reading_the_text(decoder: Decoder) -> None:
    cache, reuse = read(decoder, "blended(recompute=1.0) > unlimited()")
    assert torch.allclose(logits(decoder, cache), full(decoder, TEXT.ids), atol=1e-4)
    assert reuse == ContextReuse((9, 6, 7), (False,) * 3, recomputed_tokens=22)
    assert cache.cache_spec.form == "blended" and cache.next_position == len(TEXT.ids)


def test_a_first_context_is_that_of_the_prefix_cache(decoder: Decoder) -> None:
    text = ContextText(PREFIX, (ONE,), SUFFIX)
    cache, _ = read(decoder, "blended(recompute=0.0) > unlimited()", text)
    assert torch.allclose(logits(decoder, cache), full(decoder, text.ids), atol=1e-4)


def test_the_more_is_recomputed_the_nearer(decoder: Decoder) -> None:
    whole, errors = full(decoder, TEXT.ids), list[float]()
    for share in (0.0, 0.4, 1.0):
        cache, _ = read(decoder, f"blended(recompute={share}) > unlimited()")
        errors.append(float((logits(decoder, cache) - whole).norm()))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("spelling", ["cacheblend", "ape"])
def test_what_is_found_changes_no_number(decoder: Decoder, spelling: str) -> None:
    chunks = ChunkMemory()
    fresh, first = read(decoder, spelling, source=chunks)
    other = ContextText(PREFIX, (THREE, some_ids(4, seed=8), ONE), SUFFIX)
    _, later = read(decoder, spelling, other, chunks)
    again, last = read(decoder, spelling, source=chunks)
    assert first.cached == (False,) * 3 and last.cached == (True,) * 3
    assert later.cached == (True, False, True) and later.cached_tokens == 16
    assert torch.equal(logits(decoder, fresh), logits(decoder, again))
    _, behind = read(decoder, spelling, ContextText((1,), (ONE,), SUFFIX), chunks)
    assert behind.cached == (False,), "read behind another prefix, it is another chunk"


def test_one_parallel_context_without_factors_is_the_text(decoder: Decoder) -> None:
    text = ContextText(PREFIX, (ONE,), SUFFIX)
    plain = "parallel(temperature=1.0, scale=1.0) > unlimited()"
    cache, reuse = read(decoder, plain, text)
    assert torch.allclose(logits(decoder, cache), full(decoder, text.ids), atol=1e-4)
    assert reuse == ContextReuse((9,), (False,))
    warm, _ = read(decoder, "ape", text)
    assert not torch.allclose(logits(decoder, warm), full(decoder, text.ids), atol=1e-3)


def test_parallel_contexts_have_no_order_and_go_on_behind_the_longest(decoder: Decoder) -> None:
    one, _ = read(decoder, "ape")
    other, _ = read(decoder, "ape", ContextText(PREFIX, (THREE, ONE, TWO), SUFFIX))
    assert torch.allclose(logits(decoder, one), logits(decoder, other), atol=1e-5)
    assert one.next_position == len(PREFIX) + len(ONE) + len(SUFFIX)
    copy = SequenceCache.restore(decoder.spec, one.state(), one.meta())
    assert torch.equal(logits(decoder, copy), logits(decoder, one))


def test_without_a_prefix_or_a_suffix(decoder: Decoder) -> None:
    text = ContextText((), (ONE, TWO), ())
    for spelling in ("blended(recompute=1.0) > unlimited()", "ape"):
        cache, reuse = read(decoder, spelling, text)
        assert reuse.tokens == (9, 6) and bool(logits(decoder, cache).isfinite().all())
    cache, _ = read(decoder, "blended(recompute=1.0) > unlimited()", text)
    assert torch.allclose(logits(decoder, cache), full(decoder, text.ids), atol=1e-4)


def test_blended_contexts_are_cut_to_a_budget(decoder: Decoder) -> None:
    spelling = "blended() > protect(sinks=2, recent=2) > snapkv(window=2) > uniform(tokens=12)"
    cache, _ = read(decoder, spelling)
    assert all(sum(heads) <= 24 for heads in cache.lengths())
    assert cache.next_position == len(TEXT.ids)
    with pytest.raises(UsageError, match="observes every token"):
        read(decoder, "blended() > protect(recent=2) > column_mass() > uniform(tokens=12)")
    with pytest.raises(UsageError, match="cannot evict"):
        read(decoder, "parallel() > protect(recent=2) > keydiff() > uniform(tokens=12)")


def test_other_schedules_read_contexts_as_one_text(decoder: Decoder) -> None:
    cache, reuse = read(decoder, "full", source=(chunks := ChunkMemory()))
    assert torch.allclose(logits(decoder, cache), full(decoder, TEXT.ids), atol=1e-4)
    assert reuse.cached_tokens == 0 and not chunks.nbytes


def test_memory_drops_the_least_recently_used_chunk(decoder: Decoder) -> None:
    probe = ChunkMemory()
    read(decoder, "ape", ContextText((), (ONE, TWO), ()), probe)
    chunks = ChunkMemory(probe.nbytes)
    for contexts in ((ONE, TWO), (ONE,), (THREE,)):
        read(decoder, "ape", ContextText((), contexts, ()), chunks)
    assert chunks.nbytes <= probe.nbytes
    assert chunks.find(decoder.spec, (), THREE) and not chunks.find(decoder.spec, (), TWO)
    with pytest.raises(ModelError, match="one loaded model"):
        chunks.find(Decoder(tiny("llama", layers=3)).spec, (), ONE)


def test_bad_values_and_models_are_refused(decoder: Decoder) -> None:
    for make in (
        lambda: Blended(recompute=1.5),
        lambda: Parallel(temperature=0.0),
        lambda: Parallel(scale=1.1),
        lambda: ChunkMemory(0),
    ):
        with pytest.raises(BadParameter):
            make()
    sliding = Decoder(tiny("gemma3", layers=3))
    for spelling in ("cacheblend", "ape"):
        with pytest.raises(ModelError, match="sliding windows"):
            read(sliding, spelling)
