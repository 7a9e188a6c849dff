"""Choice of an eviction policy by the savings of a replay of a server's first requests."""

from __future__ import annotations

import pytest

from larder.models import wrap_model
from larder.server import EvictionTuner, StateUse, best_variant, prefill_operations, saved_cost
from larder.store import ALPHAS, EVICTIONS, Candidate, EvictionPolicy, Marconi
from tiny_models import tiny

VARIANTS = Marconi().variants()


def saved_in_a_loop(uses: list[StateUse], rule: EvictionPolicy, capacity: int) -> float:
    held, saved = dict[str, Candidate](), 0.0
    for use in uses:
        if (before := held.pop(use.session, None)) is not None:
            saved += before.seconds
        for gone in rule.order(list(held.values()), use.time) if held else []:
            if sum(one.bytes for one in held.values()) + use.bytes <= capacity:
                break
            del held[gone.name]
        if use.bytes <= capacity:
            held[use.session] = Candidate(use.session, use.bytes, use.cost, use.time)
    return saved


def trace(costs: dict[str, float], order: str) -> list[StateUse]:
    """Requests of sessions of one size, a minute apart."""
    return [StateUse(name, 60.0 * time, 100, costs[name]) for time, name in enumerate(order)]


LONG = trace({"a": 90.0, **dict.fromkeys("bcdefgh", 1.0)}, "abcabdaefaghabc" * 3)


@pytest.mark.parametrize("rule", [EVICTIONS.load("lru")(), *VARIANTS[::5]])
def test_saved_cost_equals_its_reference(rule: EvictionPolicy) -> None:
    for capacity in (0, 100, 250, 10_000):
        assert saved_cost(LONG, rule, capacity) == saved_in_a_loop(LONG, rule, capacity)


def test_best_variant_keeps_long_sessions() -> None:
    uses = trace({"a": 90.0, **dict.fromkeys("bcdefgh", 1.0)}, "abcdaefgahbca")
    best = best_variant(uses, VARIANTS, 200)
    assert isinstance(best, Marconi) and best.alpha > 0
    assert saved_cost(uses, best, 200) == 270 > saved_cost(uses, EVICTIONS.load("lru")(), 200)


def test_best_variant_for_equal_lengths_is_recency() -> None:
    best = best_variant(trace(dict.fromkeys("abcd", 5.0), "abcabdabcacd"), VARIANTS, 200)
    assert isinstance(best, Marconi) and best.alpha == 0
    assert ALPHAS[:3] == (0.0, 0.1, 0.2) and ALPHAS[-1] == 2.0


def test_tuner_replays_five_times_the_requests_before_the_first_eviction() -> None:
    tuner = EvictionTuner(Marconi(), lambda: 200)
    uses = trace({"a": 90.0, **dict.fromkeys("bcdefgh", 1.0)}, "abcdaefgahbcaefgahbc")
    for number, use in enumerate(uses[:15], start=1):
        assert tuner.policy == Marconi() and tuner.is_observing
        tuner.note_use(use)
        if number in (3, 4):
            tuner.note_eviction()
    tuner.join()
    assert not tuner.is_observing
    assert tuner.policy == best_variant(uses[:15], VARIANTS, 200) != Marconi()


def test_policy_without_variants_is_not_tuned() -> None:
    lru = EVICTIONS.load("lru")()
    tuner = EvictionTuner(lru, lambda: 1)
    tuner.note_eviction()
    for use in LONG:
        tuner.note_use(use)
    assert tuner.policy is lru and not tuner.is_observing


def test_attention_operations_are_quadratic_without_windows() -> None:
    full, windows = (wrap_model(tiny(name)).spec for name in ("qwen3", "gemma3"))
    heads = 4 * 16  # query heads and their size
    assert prefill_operations(full, 1000, 9) == 9 * (1000 + 2 * 2 * heads * 5)
    slow = [
        prefill_operations(spec, 0, 4000) / prefill_operations(spec, 0, 2000)
        for spec in (full, windows)
    ]
    assert slow[0] == pytest.approx(4, rel=1e-3) and slow[1] < slow[0]
