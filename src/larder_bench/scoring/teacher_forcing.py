"""Scores of all questions of a conversation in a few packed passes, without decoding.

As long as nothing is evicted during decoding, greedy decoding gives the expected answer exactly if
each of its tokens is the most likely one after the tokens before it. So the expected answers are
read side by side over one cache in scratch mode, which also gives their log-likelihood; unlike
exact match, it has no floor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode, PromptLayout, Question
from larder.engine import Engine
from larder.models import BatchSegment
from larder.session import ConversationMemory, TokenizerAdapter

MAX_PACKED_TOKENS = 2048  # of questions and answers in one pass; bounds activations


@dataclass(frozen=True)
class AnswerLikelihood:
    """Teacher-forced result of the expected answer to a question.

    Args:
        hits: whether each token was the most likely one, end of turn included.
        likelihoods: log-likelihood of each token, in nats.
        episode: number of the cache that answered.
    """

    question: Question
    hits: tuple[bool, ...]
    likelihoods: tuple[float, ...]
    episode: int | None

    @property
    def exact(self) -> bool:
        """Test if greedy decoding would give the answer, end of turn included."""
        return all(self.hits)

    @property
    def log_likelihood(self) -> float:
        """Log-likelihood of the expected answer in nats per token, end of turn included."""
        return sum(self.likelihoods) / len(self.likelihoods)

    @property
    def tokens(self) -> int:
        """Length of the answer in tokens, end of turn included."""
        return len(self.hits)

    def part(self, start: int, stop: int) -> AnswerLikelihood:
        """Result of the tokens [start, stop), given the expected tokens before them."""
        hits, likelihoods = self.hits[start:stop], self.likelihoods[start:stop]
        return replace(self, hits=hits, likelihoods=likelihoods)


def split_by_spans(
    forced: AnswerLikelihood, tokenizer: TokenizerAdapter, spans: Sequence[tuple[int, int]]
) -> list[AnswerLikelihood]:
    """Results of the parts of an answer at the given character spans [start, stop).

    A token belongs to the part that contains its first character. The end of turn belongs to none.
    """
    text = forced.question.prefixed_answer
    shift = len(text) - len(forced.question.answer)
    starts = [max(0, start - shift) for start in tokenizer.token_starts(text)]
    borders = [(bisect_left(starts, start), bisect_left(starts, stop)) for start, stop in spans]
    return [forced.part(start, stop) for start, stop in borders]


@dataclass(frozen=True, eq=False)
class AnswerLogits:
    """Next-token logits at each token of an answer.

    Args:
        question_index: of the question, among all of the conversation.
        answer: tokens of the answer, end of turn included.
        logits: logits before each of them.
        episode: number of the cache that answered.
    """

    question_index: int
    answer: tuple[int, ...]
    logits: Float[Tensor, "N V"]
    episode: int | None

    def likelihood(self, question: Question) -> AnswerLikelihood:
        """Result of the answer."""
        expected = torch.tensor(self.answer, device=self.logits.device)
        likelihoods = self.logits.log_softmax(-1).gather(1, expected[:, None])[:, 0]
        hits = self.logits.argmax(-1) == expected
        return AnswerLikelihood(
            question, tuple(hits.tolist()), tuple(likelihoods.tolist()), self.episode
        )


@dataclass(frozen=True)
class _PackedAnswer:
    question_index: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer) - 1


def score_answers(
    engine: Engine, memory: ConversationMemory, questions: Sequence[Question]
) -> list[AnswerLikelihood]:
    """Results of the expected answers, in the order of the questions."""
    return _in_order(questions, answer_logits(engine, memory, questions))


def score_answers_stepwise(
    engine: Engine, memory: ConversationMemory, questions: Sequence[Question]
) -> list[AnswerLikelihood]:
    """Results from `answer_logits_stepwise`."""
    return _in_order(questions, answer_logits_stepwise(engine, memory, questions))


def answer_logits(
    engine: Engine, memory: ConversationMemory, questions: Sequence[Question]
) -> Iterator[AnswerLogits]:
    """Logits at the tokens of all answers; answers of one episode are read side by side."""
    matches = [memory.router.route(question.question) for question in questions]
    episodes = [None if match is None else match.episode for match in matches]
    for episode in sorted(set(episodes), key=lambda number: number or 0):
        cache = memory.caches.activate(episode or 0)
        sections = [
            _PackedAnswer(
                question_index,
                engine.tokenizer.encode_question_about(memory.conversation, question),
                _answer_ids(engine, memory, question),
            )
            for question_index, question in enumerate(questions)
            if episodes[question_index] == episode
        ]
        for group in _packed_groups(sections):
            for section, logits in _forward_group(engine, cache, group):
                yield AnswerLogits(section.question_index, section.answer, logits, episode)


def answer_logits_stepwise(
    engine: Engine, memory: ConversationMemory, questions: Sequence[Question]
) -> Iterator[AnswerLogits]:
    """Logits at the tokens of all answers, token by token, each question on a fork, so that entries
    are recalled at every step.

    A question is read in one pass. Nothing is evicted.
    """
    for question_index, question in enumerate(questions):
        cache, match = memory.activate_for(question.question)
        fork, rows = cache.fork(), list[Tensor]()
        ids = engine.tokenizer.encode_question_about(memory.conversation, question)
        answer = _answer_ids(engine, memory, question)
        for token in answer:
            segment = BatchSegment(fork, ids)
            rows.append(
                engine.loaded.decoder.forward_logits([segment], Mode.APPEND, [len(ids) - 1])[0]
            )
            ids = (token,)
        episode = None if match is None else match.episode
        yield AnswerLogits(question_index, answer, torch.stack(rows), episode)


def _in_order(
    questions: Sequence[Question], answers: Iterator[AnswerLogits]
) -> list[AnswerLikelihood]:
    results = {one.question_index: one.likelihood(questions[one.question_index]) for one in answers}
    return [results[question_index] for question_index in range(len(questions))]


def _answer_ids(engine: Engine, memory: ConversationMemory, question: Question) -> tuple[int, ...]:
    """Token ids of an answer and of the end of turn; without the end if the answer was started for
    the model, or no chat format ends it.
    """
    ids = engine.tokenizer.encode(question.prefixed_answer)
    if question.answer_prefix or memory.conversation.form is PromptLayout.PLAIN:
        return ids
    return ids + engine.tokenizer.end_of_turn_ids()[:1]


def _packed_groups(sections: Sequence[_PackedAnswer]) -> Iterator[list[_PackedAnswer]]:
    group: list[_PackedAnswer] = []
    for section in sections:
        if group and sum(map(len, group)) + len(section) > MAX_PACKED_TOKENS:
            yield group
            group = []
        group.append(section)
    if group:
        yield group


def _forward_group(
    engine: Engine, cache: SequenceCache, group: Sequence[_PackedAnswer]
) -> Iterator[tuple[_PackedAnswer, Float[Tensor, "N V"]]]:
    """Logits of a group's answers, read over one cache; the last token of an answer is only
    predicted.
    """
    ids = tuple(token for section in group for token in (section.prompt + section.answer)[:-1])
    segment, rows, first = BatchSegment(cache, ids, tuple(map(len, group))), list[int](), 0
    for section in group:
        stop = first + len(section)
        rows += range(stop - len(section.answer), stop)
        first = stop
    logits = engine.loaded.decoder.forward_logits([segment], Mode.SCRATCH, rows)
    parts = logits.split([len(section.answer) for section in group])
    yield from zip(group, parts, strict=True)
