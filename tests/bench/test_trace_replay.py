"""A replay stays within its capacity, counts its savings, and never exceeds the bound."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from larder.store import EVICTIONS, NUM_QUANTILES, EvictionPolicy, SupersededOrder
from larder_bench.offline_optimum import Belady, Clairvoyant, FutureReads, ReuseIntervals
from larder_bench.trace_replay import (
    MIN_PAUSES,
    SimulatedTier,
    ToolDurations,
    best_policy,
    replay_trace,
)
from larder_bench.traces.base import NONE, TRACES, StateForm, Trace
from references.trace_replay import Loop

RULES = sorted(EVICTIONS.builtin_names())
CROWDS = pytest.mark.parametrize("name", sorted(TRACES.builtin_names()))
FORMS = pytest.mark.parametrize("form", list(StateForm))


@cache
def trace_of(name: str, form: StateForm, events: int = 300) -> Trace:
    return TRACES.load(name)(form=form).make(0, events)


@cache
def held_of(name: str, form: StateForm, events: int = 300) -> ReuseIntervals:
    return ReuseIntervals.of(trace_of(name, form, events))


def rule(name: str, **parameters: object) -> EvictionPolicy:
    return EVICTIONS.load(name)(**parameters)


@CROWDS
@FORMS
def test_unlimited_tier_hits_all_known_tokens(name: str, form: StateForm) -> None:
    trace = trace_of(name, form)
    counts = replay_trace(trace, rule("lru"), sum(cached.bytes for cached in trace.objects))
    assert counts.hit_tokens == counts.known_tokens > 0 and counts.evictions == 0
    assert counts.hit_seconds == pytest.approx(counts.known_seconds)


@CROWDS
@FORMS
@pytest.mark.parametrize("fate", list(SupersededOrder))
def test_tier_stays_within_its_budget_and_holds_parents_of_held_objects(
    name: str, form: StateForm, fate: SupersededOrder
) -> None:
    trace, budget = trace_of(name, form), held_of(name, form).needed_bytes() // 4
    tier = SimulatedTier(trace, rule("gdsf", superseded=fate), budget)
    for event in trace.events:
        event.play(tier)
        held = tier._rows
        sizes = [trace.objects[object_id].bytes for object_id in held]
        assert tier._used == sum(sizes) <= budget
        for object_id, row in held.items():
            parent = trace.objects[object_id].parent
            assert tier._columns.codes[row] == object_id and (parent == NONE or parent in held)
    assert tier.counts.evictions > 0 and tier.counts.peak_bytes <= budget


@pytest.mark.parametrize("name", ["chat", "workflows"])
@pytest.mark.parametrize("eviction", ["lru", "kvflow"])
def test_whole_states_are_held_as_the_reference(name: str, eviction: str) -> None:
    trace, budget = trace_of(name, StateForm.WHOLE, 250), 3 * 2**30
    loop = Loop(trace, rule(eviction), budget)
    counts = replay_trace(trace, rule(eviction), budget)
    loop.run()
    assert (counts.hit_tokens, counts.evictions) == (loop.hit_tokens, loop.evictions)
    assert counts.evictions > 0


@CROWDS
@FORMS
def test_no_rule_exceeds_the_upper_bound(name: str, form: StateForm) -> None:
    trace, held = trace_of(name, form), held_of(name, form)
    seen = FutureReads.of(trace)
    for share in (0.1, 0.6):
        budget = int(share * held.needed_bytes())
        tokens, seconds = held.most_tokens(budget), held.most_seconds(budget)
        found = [replay_trace(trace, rule(own), budget) for own in ("lru", "gdsf", "kvflow")]
        for kind in (Belady, Clairvoyant):
            found.append(replay_trace(trace, kind(superseded=SupersededOrder.ALIKE), budget, seen))
        assert all(counts.hit_tokens <= tokens for counts in found)
        assert all(counts.hit_seconds <= seconds + 1e-9 for counts in found)
    assert max(counts.hit_tokens for counts in found[3:]) > 0.75 * tokens  # nor is it far


@CROWDS
@FORMS
def test_needed_capacity_suffices_for_an_oracle(name: str, form: StateForm) -> None:
    trace, needed = trace_of(name, form), held_of(name, form).needed_bytes()
    belady = Belady(superseded=SupersededOrder.ALIKE)
    counts = replay_trace(trace, belady, needed, FutureReads.of(trace))
    assert counts.hit_tokens == counts.known_tokens
    assert (
        replay_trace(trace, belady, needed // 2, FutureReads.of(trace)).hit_tokens
        < counts.hit_tokens
    )


def test_hints_improve_rules_that_use_them() -> None:
    for name, result in (("workflows", "kvflow"), ("agents", "continuum")):
        trace = trace_of(name, StateForm.WHOLE, 2000)
        budget = held_of(name, StateForm.WHOLE, 2000).needed_bytes() // 8
        plain = replay_trace(trace, rule("lru"), budget).hit_tokens
        assert replay_trace(trace, rule(result), budget).hit_tokens > 1.01 * plain


def test_pauses_are_guessed_until_enough_are_seen() -> None:
    pauses = ToolDurations()
    assert np.isinf(pauses.after("test")).all()
    pauses.record("test", 10.0)
    guessed = pauses.after("test")
    assert guessed.shape == (NUM_QUANTILES,) and (np.diff(guessed) > 0).all()
    assert guessed[3] < 10 * np.log(2) < guessed[4]  # the median of an exponential draw
    for _ in range(MIN_PAUSES):
        pauses.record("test", 10.0)
    assert pauses.after("test").tolist() == [10.0] * NUM_QUANTILES


def test_tuned_rule_is_best_on_the_first_part_of_the_trace() -> None:
    trace = trace_of("chat", StateForm.WHOLE, 500)
    budget = held_of("chat", StateForm.WHOLE, 500).needed_bytes() // 8
    rules = [rule("random"), rule("lru"), rule("marconi", alpha=2.0)]
    found = best_policy(trace, rules, budget, share=1.0)
    assert found is max(rules, key=lambda own: replay_trace(trace, own, budget).hit_seconds)


def test_object_larger_than_the_tier_is_refused_and_counted() -> None:
    counts = replay_trace(trace_of("chat", StateForm.PARTS), rule("lru"), 10)
    assert counts.refused > 0 and counts.peak_bytes == counts.hit_tokens == 0
