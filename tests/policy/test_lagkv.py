"""LagKV: kept sinks, and partitions compared at every budget."""

from __future__ import annotations

import pytest

from builders import a_layer, a_view
from larder import Engine, Policy
from larder.core import BudgetError, Observation
from larder.models import LoadedModel
from larder_bench.datasets.lifelog_questions import lifelog_conversation
from larder_bench.scoring.teacher_forcing import score_answers

PAPER = "whole() > protect(sinks=16, recent=0) > lagkv(lag=32) > uniform()"


def kept_by(sentence: str, observation: Observation, tokens: int) -> list[list[int]]:
    """Positions of the entries that each head keeps."""
    planner = Policy.parse(sentence).with_sizes(tokens, None).planner
    scored = planner.with_protection(observation, planner.score(observation), tokens)
    [plan] = planner.plan({0: scored}, {0: tokens}, lambda _: observation.entries).values()
    stay = observation.entries.packed_positions()[plan.kept].split(plan.lengths)
    return [head.tolist() for head in stay]


@pytest.fixture(scope="module")
def long_text() -> Observation:
    return a_view(a_layer(2, 1), [range(3211), range(3211)], 1)


@pytest.mark.parametrize("name", ["lagkv", "protect(sinks=0, recent=0) > lagkv()"])
def test_sinks_are_kept_at_small_budgets(long_text: Observation, name: str) -> None:
    for head in kept_by(name, long_text, 128):
        assert head[:16] == list(range(16))


def test_entries_of_the_whole_text_are_compared_at_small_budgets(long_text: Observation) -> None:
    for head in kept_by("lagkv", long_text, 128):
        older = [position for position in head if 16 <= position < 3211 - 64]
        assert len(older) >= 64
        assert min(older) < 100 and max(older) > 3000


@pytest.mark.parametrize(
    ("tokens", "lag"), [(128, 14), (512, 32), (1024, 32), (4112, 128), (40_000, 1024), (20, 2)]
)
def test_lag_depends_on_the_budget(tokens: int, lag: int) -> None:
    filled = Policy.parse("lagkv").with_sizes(tokens, None)
    assert f"lagkv(sinks=16, lag={lag}, " in str(filled)
    given = Policy.parse("lagkv(lag=7)").with_sizes(tokens, None)
    assert "lag=7," in str(given)


def test_budget_without_room_for_the_sinks_is_refused() -> None:
    planner = Policy.parse("protect(sinks=0, recent=0) > lagkv() > uniform()").planner
    with pytest.raises(BudgetError, match="smaller than the 16"):
        planner.quotas(12, 100, (0,), {})


@pytest.mark.extended
def test_half_budget_answers_as_many_questions_as_the_full_cache(seed_model: LoadedModel) -> None:
    full = Engine(seed_model, policy="full")
    log = lifelog_conversation(1, 1000, lambda text: len(full.tokenizer.encode(text)), 8)

    def correct_answers(policy: str, budget: str | None) -> int:
        engine = full.under(policy, budget)
        return sum(one.exact for one in score_answers(engine, engine.read(log), log.questions))

    assert (
        correct_answers("full", None)
        == correct_answers(PAPER, "50%")
        == correct_answers("lagkv", "50%")
    )


def test_hand_values_of_400_entries() -> None:
    """16 sinks, half of two partitions of 128 that are compared, and the last one: 272."""
    parts = [(0, 16), (16, 144), (144, 272), (272, 400)]
    sentence = "whole() > protect(sinks=16, recent=0) > lagkv(lag=128) > uniform()"
    observation = a_view(a_layer(2, 1), [range(400), range(400)], 1)
    for kept in kept_by(sentence, observation, 272):
        counts = [sum(start <= position < stop for position in kept) for start, stop in parts]
        assert counts == [16, 64, 64, 128]
