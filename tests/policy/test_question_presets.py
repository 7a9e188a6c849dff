"""Presets for contexts that end with the question keep what that question needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from larder import Engine
from larder.core import UsageError
from larder.models import LoadedModel
from larder_bench.datasets.lifelog_questions import lifelog_conversation
from larder_bench.scoring.teacher_forcing import score_answers

NAMES = ("laq", "laq_guidance", "dapq", "whole() > positions_first() > uniform()")


@pytest.fixture(scope="module")
def correct_answers(seed_model: LoadedModel) -> dict[str, int]:
    """Number of two questions that each policy answers at a quarter of the context."""
    full = Engine(seed_model, policy="full")
    log = lifelog_conversation(0, 500, lambda text: len(full.tokenizer.encode(text)), 2)
    return {name: _correct_answers(full.under(name, "25%"), log) for name in NAMES} | {
        "full": sum(one.exact for one in score_answers(full, full.read(log), log.questions))
    }


def _correct_answers(engine: Engine, log) -> int:
    asks_first = "question" in engine.policy.scorer.required_prompts()
    found = 0
    for question in log.questions:
        one = replace(log, questions=(question,))
        memory = engine.read(one, {"question": question.question} if asks_first else {})
        found += sum(answer.exact for answer in score_answers(engine, memory, one.questions))
    return found


@pytest.mark.extended
def test_laq_answers_as_many_as_the_full_cache_and_more_than_its_guidance(
    correct_answers: dict[str, int],
) -> None:
    assert correct_answers["laq"] == correct_answers["full"] > correct_answers["laq_guidance"]


def test_dapq_answers_more_than_positions_first(correct_answers: dict[str, int]) -> None:
    assert correct_answers["dapq"] > correct_answers[NAMES[3]]


@pytest.mark.parametrize("name", ["laq", "dapq"])
def test_missing_question_is_refused(seed_model: LoadedModel, name: str) -> None:
    engine = Engine(seed_model, policy=name, budget="25%")
    log = lifelog_conversation(0, 300, lambda text: len(engine.tokenizer.encode(text)), 1)
    with pytest.raises(UsageError, match="needs the question before prefill"):
        engine.read(log)
