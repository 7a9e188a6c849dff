"""A generated token never attends to more entries than the budget, where entries are recalled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from larder import Policy
from larder.cache import AttentionState, NewTokens, TieredLayer
from larder.core import AppendKind, BudgetError
from larder.engine import SamplingParams, StoppingCriteria, keep_generating
from larder.engine.generate import generate
from larder.models import Decoder, wrap_model
from larder.prefill import PeakMemoryMeter
from larder.session import PRESETS, ModelRuntime, build_caches, decode_planner
from model_runs import id_runtime, some_ids
from tiny_models import tiny

RECALLS = [
    "dci(page=4, dense=0)",
    'dci(page=4, dense=0, variant="paper")',
    "bounds(page=4, dense=0)",
    "flat(dense=0)",
    "wave(page=4, dense=0)",
]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("qwen3"))


def runtime(decoder: Decoder) -> ModelRuntime:
    return id_runtime(decoder)


def attended(tier: TieredLayer) -> list[int]:
    """Entries that each set of query heads has just attended to."""
    stays, choice = tier.lengths, tier.fetcher.selection
    if not tier.has_offloaded or choice is None:
        return list(stays)
    found = (choice.numbers >= 0).sum((1, 2)).tolist()
    group = len(found) // len(stays)
    return [stays[n // group] + each for n, each in enumerate(found)]


def counts_of_steps(decoder: Decoder, wanted: Policy, context: int, steps: int) -> list[int]:
    """`attended` of every layer and every generated token that was read behind a text."""
    counts, observe = list[int](), TieredLayer.observe

    def noting(self: TieredLayer, new: NewTokens, state: AttentionState) -> None:
        observe(self, new, state)
        if len(new) == 1 and self._append_kind is AppendKind.STEP:
            counts.extend(attended(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TieredLayer, "observe", noting)
        cache = build_caches(
            runtime(decoder), wanted, some_ids(context), [{}], PeakMemoryMeter()
        ).activate(0)
        tending = decode_planner(runtime(decoder), wanted, [cache])
        assert tending is not None
        generate(
            decoder,
            [cache],
            [some_ids(3, seed=5)],
            SamplingParams(),
            StoppingCriteria(steps),
            keep_generating,
            tending.observer,
        )
    return counts


@pytest.mark.extended
@settings(max_examples=10)
@given(
    budget=st.integers(16, 40),
    lag=st.sampled_from([1, 2, 4, 6]),
    context=st.sampled_from([6, 30, 60]),
    steps=st.integers(2, 16),
    recall=st.sampled_from(RECALLS),
)
def test_steps_attend_to_at_most_the_budget(decoder, budget, lag, context, steps, recall) -> None:
    stays = "blockwise(tokens=8) > protect(sinks=2, recent=2) > sinks_and_window(sinks=2)"
    sentence = f"{stays} > uniform() > park() > {recall} > lagged(tokens={lag})"
    counts = counts_of_steps(
        decoder, Policy.parse(sentence).with_sizes(budget, None), context, steps
    )
    # Where nothing is offloaded, all layers attend in one call, which observes nothing.
    assert counts or context + 3 + steps <= budget
    assert all(0 < count <= budget for count in counts)


def test_icecache_attends_to_the_budget_of_its_paper(decoder) -> None:
    """32 sinks, 17 to 32 recent tokens, and pages of 16 for the rest."""
    wanted = Policy.parse(PRESETS["icecache"].replace("dci()", "dci(dense=0)")).with_sizes(
        128, None
    )
    assert max(counts_of_steps(decoder, wanted, 160, 36)) <= 128


def test_paper_variant_selects_pages_per_query_head(decoder) -> None:
    stays = "blockwise(tokens=8) > protect(sinks=2, recent=2) > sinks_and_window(sinks=2)"
    sentence = f"{stays} > uniform() > park() > {{}} > lagged(tokens=2)"
    part = 'dci(page=2, dense=0, tokens=16, variant="{}")'
    ways = [Policy.parse(sentence.format(part.format(name))) for name in ("code", "paper")]
    code, paper = (counts_of_steps(decoder, each.with_sizes(24, None), 60, 4) for each in ways)
    group = decoder.spec.layers[0].group
    assert group > 1 and len(paper) == group * len(code)
    assert min(code) > 16 and min(paper) > 16  # sinks and window alone are at most 6


def test_slots_of_query_heads_are_counted(decoder) -> None:
    names = "code", "paper"
    sentence = 'sinks_and_window() > park() > dci(page=4, dense=0, variant="{}") > lagged(tokens=4)'
    all_caches = [
        build_caches(
            runtime(decoder),
            Policy.parse(sentence.format(n)).with_sizes(64, None),
            some_ids(96),
            [{}],
            PeakMemoryMeter(),
        )
        for n in names
    ]
    [code], [paper] = (session_caches.usage() for session_caches in all_caches)
    assert paper.slot_entries == decoder.spec.layers[0].group * code.slot_entries
    assert paper.fast_tier_bytes > code.fast_tier_bytes == sum(code.layers)


def test_lag_without_room_for_a_page_is_refused() -> None:
    policy = Policy.parse("icecache")
    with pytest.raises(BudgetError, match="64 tokens has no room for a page of 16 .* the 16 that"):
        policy.with_sizes(64, None)
