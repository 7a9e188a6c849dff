"""Answers scored in one packed pass equal those that are read alone, token by token."""

from __future__ import annotations

import pytest
import torch

from larder import Conversation, Engine, Message, Question
from larder.core import Mode
from larder.models import BatchSegment
from larder.session import ConversationMemory
from larder_bench.scoring.answer_items import numbered_item_spans
from larder_bench.scoring.teacher_forcing import AnswerLikelihood, score_answers, split_by_spans

TALK = Conversation(
    "talk",
    (
        Message("user", "Reminder 1: the vet is Vera Silva."),
        Message("assistant", "Noted."),
        Message("user", "Reminder 2: the van is kept at Vellum."),
        Message("assistant", "Alright."),
    ),
    (
        Question("Recite reminders 1 to 2.", "1: the vet is Vera Silva. 2: the van is in Oslo."),
        Question("Who is the vet?", "Vera Silva"),
    ),
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(policy="full")


@pytest.fixture(scope="module")
def memory(engine: Engine) -> ConversationMemory:
    return engine.read(TALK)


def slowly(
    engine: Engine, memory: ConversationMemory, question: Question
) -> tuple[list[bool], list[float]]:
    """Append the question to a copy of the cache, then the answer one token after the other."""
    cache = memory.caches.activate(0).fork()
    given = engine.tokenizer.encode_question(question.question)
    hits, likelihoods = [], []
    for token in engine.tokenizer.encode_answer(question.answer)[: len(_answer(engine, question))]:
        row = BatchSegment(cache, tuple(given))
        logits = engine.loaded.decoder.forward_logits([row], Mode.APPEND, [len(given) - 1])[0]
        hits.append(int(logits.argmax()) == token)
        likelihoods.append(float(torch.log_softmax(logits, 0)[token]))
        given = (token,)
    return hits, likelihoods


def _answer(engine: Engine, question: Question) -> tuple[int, ...]:
    return engine.tokenizer.encode(question.answer) + engine.tokenizer.end_of_turn_ids()[:1]


def test_packed_scoring_equals_sequential(engine: Engine, memory: ConversationMemory) -> None:
    for forced in score_answers(engine, memory, TALK.questions):
        hits, likelihoods = slowly(engine, memory, forced.question)
        assert list(forced.hits) == hits
        assert list(forced.likelihoods) == pytest.approx(likelihoods, abs=1e-3)
        assert forced.exact is all(hits)
        assert forced.log_likelihood == pytest.approx(sum(likelihoods) / len(hits), abs=1e-3)
        assert forced.tokens == len(hits)


def test_answer_is_split_into_the_tokens_of_its_items(
    engine: Engine, memory: ConversationMemory
) -> None:
    recital = score_answers(engine, memory, TALK.questions[:1])[0]
    answer = recital.question.answer
    first, second = split_by_spans(recital, engine.tokenizer, numbered_item_spans(answer))
    length = len(engine.tokenizer.encode(" 2: the van is in Oslo."))
    assert second.likelihoods == recital.likelihoods[-1 - length : -1]  # without the end of turn
    assert first.likelihoods + second.likelihoods == recital.likelihoods[:-1]
    assert not second.exact


def test_exact_and_mean_hand_values() -> None:
    forced = AnswerLikelihood(Question("?", "ab"), (True, True, False), (-1.0, -2.0, -6.0), None)
    assert (forced.exact, forced.log_likelihood, forced.tokens) == (False, -3.0, 3)
    part = forced.part(0, 2)
    assert (part.exact, part.log_likelihood, part.tokens) == (True, -1.5, 2)
