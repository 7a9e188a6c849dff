"""Timings of eviction during decoding, and the entries that may stay."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from builders import a_layer, a_plan, a_spec, draw
from larder import Policy
from larder.cache import NewTokens, SequenceCache
from larder.core import BadParameter, Mode
from larder.models import BatchSegment, LayerActivations
from larder.policy import (
    Budget,
    ContextRefresh,
    Drop,
    FixedSlot,
    KeyDiff,
    Lagged,
    Planner,
    Pooled,
    Protect,
    Split,
    Strategy,
    Timing,
    Uniform,
)
from larder.prefill import DecodeEviction

LAYERS = (a_layer(2, 1), a_layer(2, 2, window=6, index=1), a_layer(2, 2, index=2))
MANAGED = (0, 2)
TOKENS = 10
PROTECT = Protect(1, 2)
PASSES = {"short_question": [3] + [1] * 15, "long_question": [9] + [1] * 12}


class Growing:
    """A cache that reads on under the eyes of a policy that acts meanwhile."""

    def __init__(
        self, timing: Timing, prompt: int, budget: Budget, protect: Protect = PROTECT
    ) -> None:
        planner = Planner(protect, KeyDiff(), budget, Drop(), timing=timing)
        reading = timing.prefill_tokens(TOKENS)
        self.cache = SequenceCache(a_spec(*LAYERS), "ragged")
        self._read(prompt)
        for index in MANAGED:  # what reading left
            kept = a_plan([range(min(prompt, reading))] * 2, [prompt] * 2)
            self.cache.apply(index, kept)
        quotas = planner.quotas(reading, prompt, MANAGED, {})
        self.tending = DecodeEviction(planner, TOKENS, (quotas,), (prompt,))

    def run_passes(self, passes: list[int]) -> list[list[tuple[int, ...]]]:
        """Entries of each head of the managed layers, after each pass."""
        out = []
        for step, count in enumerate(passes):
            row = BatchSegment(self.cache, tuple(range(count)))
            self._read(count, self.tending.observer([0], [row], [step]))
            out.append([self.cache.lengths()[index] for index in MANAGED])
        return out

    def places(self, layer: int) -> list[set[int]]:
        entries = self.cache.entries(layer)
        return [set(entries.head_positions(head).tolist()) for head in range(2)]

    def _read(self, count: int, watch: Any = None) -> None:
        for layer in LAYERS:
            new = draw(layer, count, self.cache.next_position, layer.index)
            states = (new.queries, new.keys, new.values, new.positions)
            self.cache.attend(layer.index, NewTokens(*states, Mode.APPEND))
            if watch is not None:
                watch(0, layer.index, LayerActivations(*states))
        self.cache.advance(count)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("prompt, shared", [(4, Uniform()), (13, Pooled())], ids=["fits", "cut"])
def test_timing_equals_its_reference(timing, loop_of, passes, prompt, shared) -> None:
    got = Growing(timing, prompt, shared).run_passes(PASSES[passes])
    sums = [[sum(heads) for heads in layers] for layers in got]
    expected = loop_of(timing).held(timing, TOKENS, prompt, PASSES[passes])
    assert sums == [[2 * now] * 2 for now in expected]
    if isinstance(shared, Uniform):
        assert all(len(set(heads)) == 1 for layers in got for heads in layers)


@pytest.mark.parametrize("tokens", [1, 2, 3, 10, 11, 500])
def test_prefill_budget_equals_its_reference(timing, loop_of, tokens) -> None:
    assert timing.prefill_tokens(tokens) == loop_of(timing).reading(timing, tokens)


def test_prefill_and_decode_quotas_stay_within_the_budget(timing) -> None:
    for tokens in (1, 7, 100):
        quota = timing.prefill_tokens(tokens)
        for step in (0, 1, 50, 5000):
            assert quota <= timing.quota(quota, tokens, step) <= tokens


@pytest.mark.parametrize("strategy", Strategy)
def test_prefill_entries_are_kept_during_decoding(strategy) -> None:
    growing = Growing(Split(0.6, strategy, recent=2, every=3), 13, Pooled())
    before = [growing.places(layer) for layer in MANAGED]
    growing.run_passes(PASSES["long_question"])
    end = growing.cache.next_position
    for layer, heads in zip(MANAGED, before, strict=True):
        for was, now in zip(heads, growing.places(layer), strict=True):
            assert was == {position for position in now if position < 13}
            assert {end - 2, end - 1} <= now


def test_refresh_rounds_keep_a_share_by_depth() -> None:
    """Blocks of 4 behind 3 recent tokens: 3 of 4 stay in layer 0, 1 of 4 at two thirds."""
    part = ContextRefresh(4, 0.9, 0.1, 3, 0.1, "last_query() > sum() > group_mean()")
    assert [part.survivors(depth) for depth in (0.0, 2 / 3)] == [3, 1]
    growing = Growing(part, 1, Uniform(), Protect(0, 1))
    before = [set[int]()] * 4
    for step in range(1, 12):
        growing.run_passes([1])
        after = [places for layer in MANAGED for places in growing.places(layer)]
        assert all({0} | set(range(max(1, step - 2), step + 1)) <= now for now in after)
        kept = [
            [len(now & set(range(1, 5))) for now in after[:2]],
            [len(now & set(range(1, 5))) for now in after[2:]],
        ]
        assert kept == ([[3, 3], [1, 1]] if step >= 7 else [[min(step, 4)] * 2] * 2)
        if step > 7:  # what stayed is not judged again while there is room: 9 of 10 entries
            assert all(
                was & set(range(1, 5)) <= now for was, now in zip(before, after, strict=True)
            )
        before = after


def test_refresh_requires_a_scorer() -> None:
    with pytest.raises(BadParameter, match=r"context_refresh\.scorer must be a scorer: No scorer"):
        ContextRefresh(scorer="uniform()")


def test_context_refresh_hand_values() -> None:
    """int(16 * .9 * r) with r = .9 (cos(pi l / 32) + 1) / 2 + .1: 14.4, 7.92 and 1.47."""
    own = ContextRefresh()
    assert [own.survivors(layer / 32) for layer in (0, 16, 31)] == [14, 7, 1]
    assert own.recent_tokens(1000) == 100 and own.generation_capacity(1000) == 200


@pytest.mark.parametrize("passes", [[1] * 40, [3, 1, 1, 7, 1]])
@pytest.mark.parametrize("distance", [1, 4, TOKENS, TOKENS + 5])
def test_fixed_slot_is_evicted_at_every_step(loop_of, passes, distance) -> None:
    part = FixedSlot(distance)
    growing = Growing(part, 13, Uniform(), Protect(0, 1))
    before = [growing.places(layer) for layer in MANAGED]
    growing.run_passes(passes)
    for layer, heads in zip(MANAGED, before, strict=True):
        for was, now in zip(heads, growing.places(layer), strict=True):
            assert now == set(loop_of(part).places(part, TOKENS, sorted(was), passes, 13))


def test_elastic_cache_keeps_the_first_entries_and_the_latest() -> None:
    preset = Policy.parse("elastic_cache")
    assert preset.timing == FixedSlot(distance=25) and preset.protect.recent <= 25
    growing = Growing(FixedSlot(4), 13, Uniform(), preset.protect)
    [before, _] = [sorted(head) for head in growing.places(0)]
    growing.run_passes([1] * 40)
    [after, _] = [sorted(head) for head in growing.places(0)]
    assert after == [*before[: TOKENS - 4], 49, 50, 51, 52]


def test_split_decode_quota_grows_to_the_remaining_budget() -> None:
    split = Split(0.5, Strategy.ADAPTIVE, recent=4, every=10)
    rooms = [split.quota(50, 100, step) - 50 for step in (0, 9, 10, 25, 459, 460, 10**6)]
    assert rooms == [4, 4, 5, 6, 49, 50, 50]
    assert Split(0.5, Strategy.SLIDE, recent=4).quota(50, 100, 0) == 100
    assert Split(0.5, Strategy.ADAPTIVE, recent=400).quota(50, 100, 0) == 100


def test_timing_is_frozen_and_cites_its_paper(timing) -> None:
    assert hash(timing) == hash(type(timing)(**vars(timing)))
    citation = inspect.getmodule(type(timing)).__doc__ or ""
    assert "arXiv:" in citation or "o paper" in citation


def test_timings_that_extend_protection_add_prefill_and_latest_entries(timing) -> None:
    protected = torch.tensor([False, True, False, False, True, False])
    positions = torch.arange(6, dtype=torch.int32)
    own, waits = timing.extends_protection, isinstance(timing, ContextRefresh)
    shielded = timing.generation_protection(protected, positions, 3, 6, TOKENS).tolist()
    assert shielded == [own, True, own, waits, True, own]  # two of the latest, and what is not due


@pytest.mark.parametrize(
    "kind, value",
    [
        (Lagged, {"tokens": 0}),
        (ContextRefresh, {"tokens": 0}),
        (ContextRefresh, {"kept": 0.0}),
        (ContextRefresh, {"share": 1.5}),
        (ContextRefresh, {"recent": 0}),
        (ContextRefresh, {"reading": 1.0}),
        (FixedSlot, {"distance": 0}),
        (Split, {"reading": 0.0}),
        (Split, {"reading": 1.0}),
        (Split, {"recent": 0}),
        (Split, {"every": 0}),
    ],
)
def test_parameters_out_of_range_are_refused(kind, value) -> None:
    [name] = value
    with pytest.raises(BadParameter, match=rf"\.{name} must be .*, got {value[name]}\."):
        kind(**value)
