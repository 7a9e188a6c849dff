"""Training samples have a task's text and its answers, within the row length."""

from __future__ import annotations

from random import Random

import pytest

from larder.core import BadParameter
from larder.models import load
from larder_bench.datasets.sources import TaskSources
from training.model_config import BOS, END, SPECIAL
from training.samples import (
    ANSWER,
    SKIPPED,
    TEXT,
    MixtureComponent,
    Recipe,
    SampleMixture,
    TrainingSample,
)

CONTEXT = 512


@pytest.fixture(scope="module")
def tokenizer():
    return load("seed").tokenizer.backend_tokenizer


def _mixer(tokenizer, *ingredients: MixtureComponent, prose: tuple[str, ...] = ()) -> SampleMixture:
    sources = TaskSources(lambda text: len(tokenizer.encode(text).ids))
    if prose:
        sources.__dict__["prose"] = prose
    return SampleMixture(ingredients, sources, tokenizer)


def _answers(sample: TrainingSample, tokenizer) -> list[str]:
    """Texts of the runs of answer tokens, without their end tokens."""
    found, run = [], []
    for token, use in zip(sample.ids, sample.uses, strict=True):
        if use == ANSWER and token != END:
            run.append(token)
        elif run:
            found.append(tokenizer.decode(run))
            run = []
    return found


def test_answers_are_in_the_text(tokenizer):
    mixer = _mixer(tokenizer, MixtureComponent("lookup(questions={questions})", 1, 0.4))
    sample = mixer.draw(Random(3), CONTEXT)
    answers = _answers(sample, tokenizer)
    texts = [t for t, use in zip(sample.ids, sample.uses, strict=True) if use == TEXT]
    result = tokenizer.decode(texts)
    assert len(answers) > 2
    assert all(f": {answer}." in result for answer in answers)
    assert len(sample.ids) <= CONTEXT + 1


def test_role_marks_are_not_predicted_but_ends_are(tokenizer):
    mixer = _mixer(tokenizer, MixtureComponent("lookup(questions={questions})", 1, 0.4))
    sample = mixer.draw(Random(3), CONTEXT)
    roles = {SPECIAL.index(f"<|{role}|>") for role in ("system", "user", "assistant")}
    for token, use in zip(sample.ids, sample.uses, strict=True):
        assert (use == SKIPPED) == (token in roles or token == BOS)


def test_rows_are_padded_and_repeat_by_seed(tokenizer):
    mixer = _mixer(tokenizer, MixtureComponent("ledger(steps={questions})", 1, 0.45, 20))
    first, again = (next(mixer.rows(5, CONTEXT, 2)) for _ in range(2))
    assert first[0].shape == (2, CONTEXT + 1)
    assert (first[0] == again[0]).all() and (first[1] == again[1]).all()
    assert (first[1][first[0] == 0] == SKIPPED).all()


def test_copying_repeats_the_text(tokenizer):
    text = "One morning the grey cat went out to look for the sea and found a field. " * 20
    mixer = _mixer(tokenizer, MixtureComponent("copy", 1, 0.5), prose=(text,))
    (answer,) = _answers(mixer.draw(Random(0), 128), tokenizer)
    assert answer in text
    assert len(tokenizer.encode(answer).ids) > 20


def test_context_too_small_for_any_task_is_refused(tokenizer):
    mixer = _mixer(tokenizer, MixtureComponent("ledger(steps=64)", 1, 0.6))
    with pytest.raises(BadParameter, match="training.context"):
        mixer.draw(Random(0), 64)


def test_recipe_parses_and_its_shares_are_positive():
    recipe = Recipe.read()
    assert all(each.share > 0 and 0 <= each.asked < 1 for each in recipe.ingredients)
    assert [phase.context for phase in recipe.phases] == sorted(p.context for p in recipe.phases)
