"""Evictions behind decode steps over pages: kernels keep what plans keep without pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_device import FakeDevice, FakeKernels
from larder import Policy
from larder.cache import EvictionTables, PageArena, SequenceCache
from larder.core import CacheError, InputError, Mode, StepMerging
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import (
    BatchSegment,
    Decoder,
    ForwardBatch,
    JoinedObserver,
    LayerRunner,
    PagedSteps,
    wrap_model,
)
from larder.ops import AttentionBackend
from larder.prefill import EvictionPass, PeakMemoryMeter
from larder.session import build_caches, decode_planner
from larder_bench.profiling.eager_capture import EagerCapture
from model_runs import id_runtime, some_ids
from tiny_models import tiny

H2O = "whole() > protect(sinks=0, recent=0.5) > column_mass() > uniform() > every_step()"
D2O = (
    "whole() > protect(sinks=4, recent=0.25) > column_mass() > inverse_variance() > fold_ema() > "
    "every_step()"
)
ROCO = "blockwise(tokens=16) > protect(sinks=0, recent=4) > roco() > uniform() > every_step()"
POLICIES = {"h2o": H2O, "d2o": D2O, "lagged": H2O.replace("every_step()", "lagged(tokens=3)")}
STEPS, LAYERS, PAGE, BUDGET = 24, 3, 16, 20
MOST_LAUNCHES = 6  # of a layer's attention, cache and eviction


@pytest.fixture
def steps(monkeypatch) -> Iterator[list[int]]:
    """Number of sequences that kernels evicted from, for each step of theirs."""
    found: list[int] = []
    update = EvictionTables.update

    def counting(self: EvictionTables, evictions: Any) -> None:
        found.append(len(evictions))
        update(self, evictions)

    monkeypatch.setattr(EvictionTables, "update", counting)
    yield found


def a_decoder(has_pages: bool, is_captured: bool = False, dtype: Any = torch.float32) -> Decoder:
    decoder = wrap_model(tiny("qwen3", layers=LAYERS).to(dtype))
    if has_pages:
        arena = PageArena(decoder.spec, 400, PAGE, AttentionBackend.GATHERED)
        decoder.use_pages(arena, EagerCapture() if is_captured else None)
    return decoder


def read(decoder: Decoder, sentence: str) -> tuple[SequenceCache, Any]:
    """Cache of a prompt, and what makes observers of the steps behind it."""
    policy = Policy.parse(sentence).with_sizes(BUDGET, None)
    runtime = id_runtime(decoder)
    cache = build_caches(runtime, policy, some_ids(48), [{}], PeakMemoryMeter()).activate(0)
    return cache, decode_planner(runtime, policy, [cache])


def answers(decoder: Decoder, sentence: str) -> tuple[list[list[int]], list[SequenceCache]]:
    """Tokens of two answers to a prompt, and their caches; one is a fork of the other."""
    cache, _ = read(decoder, sentence)
    caches = [cache, cache.fork()]
    planner = decode_planner(
        id_runtime(decoder), Policy.parse(sentence).with_sizes(BUDGET, None), caches
    )
    assert planner is not None
    stop = StoppingCriteria(STEPS)
    prompts = [some_ids(1), some_ids(2, seed=5)]
    made = generate(
        decoder, caches, prompts, SamplingParams(), stop, make_observer=planner.observer
    )
    rows = list(zip(*([int(token) for token in row] for row in made), strict=False))
    return [list(row) for row in rows], caches


def assert_alike(paged: SequenceCache, plain: SequenceCache) -> None:
    """The same entries in the same order, and numbers beside them but for rounding."""
    assert paged.lengths() == plain.lengths()
    states = paged.state(), plain.state()
    assert states[0].keys() == states[1].keys()
    for name, own in states[0].items():
        if name.endswith(("positions", "lengths")):
            assert torch.equal(own, states[1][name]), name
        torch.testing.assert_close(own, states[1][name], atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("is_captured", [False, True])
def test_kernels_keep_what_is_kept_without_pages(steps, name, is_captured) -> None:
    expected, plain = answers(a_decoder(False), POLICIES[name])
    assert not steps
    tokens, paged = answers(a_decoder(True, is_captured), POLICIES[name])
    assert tokens == expected
    for own, other in zip(paged, plain, strict=True):
        assert_alike(own, other)
    # Where a head loses several entries at once, plans do it: every third step of "lagged".
    assert sum(steps) >= (STEPS if name == "lagged" else 2 * STEPS - 8)


def test_kernels_need_no_plans(monkeypatch) -> None:
    decoder = a_decoder(True)
    cache, planner = read(decoder, H2O)
    step(decoder, [cache], planner, 1)  # behind the prompt, more than one entry may go
    monkeypatch.setattr(EvictionPass, "_plans", None)
    for number in range(2, 6):
        step(decoder, [cache], planner, number)
    assert {len(set(own)) for own in cache.lengths()} == {1}
    assert cache.lengths()[0][0] == BUDGET


def step(decoder: Decoder, caches: list[SequenceCache], planner: Any, number: int) -> Tensor:
    segments = [BatchSegment(cache, (20 + number + row,)) for row, cache in enumerate(caches)]
    observer = planner.observer([0] * len(caches), segments, [number] * len(caches))
    return decoder.forward_logits(segments, Mode.APPEND, range(len(caches)), observer)


def plain_step(decoder: Decoder, cache: SequenceCache) -> Tensor:
    """Step without a policy."""
    return decoder.forward_logits([BatchSegment(cache, (40,))], Mode.APPEND, range(1))


def test_rules_that_kernels_lack_go_by_plans(steps) -> None:
    expected, plain = answers(a_decoder(False), ROCO)
    tokens, paged = answers(a_decoder(True), ROCO)
    assert tokens == expected and not steps
    for own, other in zip(paged, plain, strict=True):
        assert_alike(own, other)


@pytest.mark.parametrize("is_captured", [False, True])
def test_sequences_of_several_policies_share_a_step(steps, is_captured) -> None:
    """H2O, D2O, one by plans and one without a policy: each as alone without pages."""
    sentences, rows = (H2O, D2O, ROCO), list[list[Tensor]]()
    ends: list[list[SequenceCache]] = []
    for decoder in (a_decoder(False), a_decoder(True, is_captured)):
        pairs = [read(decoder, sentence) for sentence in sentences]
        caches = [*(cache for cache, _ in pairs), SequenceCache(decoder.spec, "dense")]
        decoder.read([BatchSegment(caches[3], some_ids(30))], Mode.APPEND)
        outs: list[Tensor] = []
        for number in range(1, 8):
            segments = [BatchSegment(c, (20 + number + row,)) for row, c in enumerate(caches)]
            own = {
                row: planner.observer([0], [segments[row]], [number])
                for row, (_, planner) in enumerate(pairs)
            }
            observer = JoinedObserver(own)
            outs.append(decoder.forward_logits(segments, Mode.APPEND, range(4), observer))
        rows.append(outs)
        ends.append(caches)
    for paged, plain in zip(rows[1], rows[0], strict=True):
        torch.testing.assert_close(paged, plain, atol=1e-4, rtol=0)
    for paged, plain in zip(ends[1], ends[0], strict=True):
        assert_alike(paged, plain)
    assert steps.count(2) >= 6


def test_failed_pass_leaves_entries_as_they_were(monkeypatch) -> None:
    decoder = a_decoder(True)
    cache, planner = read(decoder, D2O)
    step(decoder, [cache], planner, 1)
    step(decoder, [cache], planner, 2)
    before, attend = cache.state(), PagedSteps.attend

    def failing(self: PagedSteps, layer: int, *sides: Any) -> Any:
        if layer == LAYERS - 1:
            raise InputError("interrupted")
        return attend(self, layer, *sides)

    with monkeypatch.context() as failure:
        failure.setattr(PagedSteps, "attend", failing)
        with pytest.raises(InputError, match="interrupted"):
            step(decoder, [cache], planner, 3)
    after = cache.state()
    assert all(torch.equal(own.nan_to_num(), after[n].nan_to_num()) for n, own in before.items())
    step(decoder, [cache], planner, 3)


@pytest.mark.parametrize("name", ["h2o", "d2o"])
@pytest.mark.parametrize("is_captured", [False, True])
def test_evictions_that_fail_halfway_leave_no_usable_cache(monkeypatch, name, is_captured) -> None:
    """Some layers have lost an entry; a sequence beside them without a policy is as it was."""
    decoder = a_decoder(True, is_captured)
    cache, planner = read(decoder, POLICIES[name])
    plain = SequenceCache(decoder.spec, "dense")
    decoder.read([BatchSegment(plain, some_ids(20))], Mode.APPEND)

    def joined_step(number: int) -> None:
        segments = [BatchSegment(own, (30 + number,)) for own in (cache, plain)]
        observer = JoinedObserver({0: planner.observer([0], segments[:1], [number])})
        decoder.forward_logits(segments, Mode.APPEND, range(2), observer)

    for number in (1, 2):  # with a capture
        joined_step(number)
    evict, before = EvictionTables._evict_layer, plain.state()

    def failing(self: EvictionTables, layer: Any, *given: Any) -> None:
        if layer is list(self._tables.layers.values())[-1]:
            raise InputError("interrupted")
        evict(self, layer, *given)

    with monkeypatch.context() as failure, pytest.raises(InputError, match="interrupted"):
        failure.setattr(EvictionTables, "_evict_layer", failing)
        joined_step(3)
    with pytest.raises(CacheError, match="cannot be used"):
        step(decoder, [cache], planner, 3)
    with pytest.raises(CacheError, match="cannot be used"):
        cache.fork()
    after = plain.state()
    assert all(torch.equal(own, after[n]) for n, own in before.items())
    assert plain_step(decoder, plain).isfinite().all()


@pytest.mark.parametrize("is_captured", [False, True])
def test_observer_that_fails_beside_evictions_of_kernels(is_captured) -> None:
    """Layer by layer it fails before they evict; behind a graph they have evicted."""
    decoder = a_decoder(True, is_captured)
    cache, planner = read(decoder, H2O)
    other = cache.fork()
    for number in (1, 2):
        step(decoder, [cache], planner, number)
    before, segments = cache.lengths(), [BatchSegment(own, (30,)) for own in (cache, other)]

    def failing(segment: int, layer: int, activations: Any) -> None:
        raise InputError("refused")

    observer = JoinedObserver({0: planner.observer([0], segments[:1], [3]), 1: failing})
    with pytest.raises(InputError, match="refused"):
        decoder.forward_logits(segments, Mode.APPEND, range(2), observer)
    assert plain_step(decoder, other).isfinite().all()
    if is_captured:
        with pytest.raises(CacheError, match="cannot be used"):
            step(decoder, [cache], planner, 3)
    else:
        assert cache.lengths() == before
        assert step(decoder, [cache], planner, 3).isfinite().all()


def test_no_room_for_copies_of_a_fork_is_refused_before_a_step() -> None:
    decoder = a_decoder(True)
    cache, planner = read(decoder, H2O)
    step(decoder, [cache], planner, 1)
    step(decoder, [cache], planner, 2)
    fork = cache.fork()
    assert isinstance(decoder.spec.arena, PageArena)
    pages = decoder.spec.arena.pages[1]
    held, before = pages.take(len(pages._free)), fork.lengths()
    with pytest.raises(CacheError, match="larger num_pages"):
        step(decoder, [fork], planner, 3)
    assert fork.lengths() == before
    pages.release(held)
    assert step(decoder, [fork], planner, 3).isfinite().all()
    assert cache.lengths() == before


def test_merges_of_another_slack_go_by_plans() -> None:
    decoder = a_decoder(True)
    cache, planner = read(decoder, D2O)
    step(decoder, [cache], planner, 1)
    segments = [BatchSegment(cache, (30,))]
    observer = planner.observer([0], segments, [2])
    own = observer.page_evictions([0])
    assert own[0].merging is not None and len(own[0].layers) == LAYERS
    assert observer.page_evictions([0], replace(own[0].merging, rate=0.1)) == own
    assert observer.page_evictions([0], replace(own[0].merging, slack=0.1)) == {}
    assert observer.page_evictions([0], StepMerging("other", 0.7, own[0].merging.slack)) == {}


@pytest.mark.parametrize("name", ["h2o", "d2o"])
def test_step_with_evictions_does_not_synchronize(monkeypatch, name) -> None:
    """Two sequences: no wait, and six launches per layer where Triton's kernels stand in."""
    monkeypatch.setattr(Decoder, "layer_runner", LayerRunner())  # as on an accelerator
    dtype = torch.bfloat16
    decoder, alike = a_decoder(True, dtype=dtype), a_decoder(True, dtype=dtype)
    (cache, planner), (twin, other) = (read(own, POLICIES[name]) for own in (decoder, alike))
    runs = (decoder, [cache, cache.fork()], planner), (alike, [twin, twin.fork()], other)
    for own in runs:
        for number in (1, 2, 3):
            step(*own, number)
    outs: list[Tensor] = []
    assert isinstance(decoder.spec.arena, PageArena)
    with FakeDevice() as device, monkeypatch.context() as counting:
        kernels = FakeKernels(device)
        kernels.replace(counting)
        for pages in decoder.spec.arena.pages.values():
            pages.backend = AttentionBackend.TRITON
        counts = kernels.count_calls(counting, (ForwardBatch, "attend"), (PagedSteps, "evict"))
        outs += [step(*runs[0], number) for number in range(4, 9)]
    expected = [step(*runs[1], number) for number in range(4, 9)]
    torch.testing.assert_close(torch.cat(outs), torch.cat(expected), atol=1e-6, rtol=0)
    assert len(counts["attend"]) == 5 * LAYERS and len(counts["evict"]) == 5
    assert max(counts["attend"]) + max(counts["evict"]) / LAYERS <= MOST_LAUNCHES
    assert min(counts["evict"]) == 3 * LAYERS
