"""Score all questions of a conversation in a few packed passes, without decoding.

While nothing is evicted during decoding, greedy decoding gives the expected answer exactly if each
of its tokens is the most likely one after the tokens before it. So the expected answers can be
read, all side by side over one cache, in scratch mode; their log-likelihood comes with it and,
unlike exact match, has no floor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from larder.cache.sequence import SequenceCache
from larder.core.conversation import Question
from larder.core.types import Mode
from larder.engine.engine import Engine
from larder.models.passes import Row
from larder.session.memory import Memory
from larder.session.transcript import Scribe

PASS_TOKENS = 2048  # questions and answers packed into one pass; bounds activations


@dataclass(frozen=True)
class Forced:
    """How the expected answer to one question fared.

    Args:
        hits: for each of its tokens, end of turn included, whether it was the most likely one.
        likelihoods: the log-likelihood of each, in nats.
        episode: the cache that answered.
    """

    question: Question
    hits: tuple[bool, ...]
    likelihoods: tuple[float, ...]
    episode: int | None

    @property
    def exact(self) -> bool:
        """Whether greedy decoding would give it, end of turn included."""
        return all(self.hits)

    @property
    def log_likelihood(self) -> float:
        """Of the expected answer, in nats per token, end of turn included."""
        return sum(self.likelihoods) / len(self.likelihoods)

    @property
    def tokens(self) -> int:
        """Its length, end of turn included."""
        return len(self.hits)

    def part(self, start: int, stop: int) -> Forced:
        """How the tokens [start, stop) fared, all before them given as expected."""
        hits, likelihoods = self.hits[start:stop], self.likelihoods[start:stop]
        return replace(self, hits=hits, likelihoods=likelihoods)


def parts_of(forced: Forced, scribe: Scribe, spans: Sequence[tuple[int, int]]) -> list[Forced]:
    """The parts of an answer that stand at the given characters [start, stop), one by one.

    A token belongs to the part that its first character stands in. The end of turn belongs to none.
    """
    starts = scribe.starts(forced.question.answer)
    borders = [(bisect_left(starts, start), bisect_left(starts, stop)) for start, stop in spans]
    return [forced.part(*border) for border in borders]


@dataclass(frozen=True)
class _Section:
    place: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer) - 1


def force(engine: Engine, memory: Memory, questions: Sequence[Question]) -> list[Forced]:
    """Score the expected answers; results in the order of the questions."""
    wrap = memory.conversation.question_prompt
    matches = [memory.router.route(question.question) for question in questions]
    episodes = [None if match is None else match.episode for match in matches]
    results: dict[int, Forced] = {}
    for episode in sorted(set(episodes), key=lambda number: number or 0):
        cache = memory.shelf.activate(episode or 0)
        sections = [
            _Section(
                place,
                engine.scribe.question(wrap.format(question=question.question)),
                _ending(engine, question.answer),
            )
            for place, question in enumerate(questions)
            if episodes[place] == episode
        ]
        for group in _groups(sections):
            for section, hits, likelihoods in _pass(engine, cache, group):
                question = questions[section.place]
                results[section.place] = Forced(question, hits, likelihoods, episode)
    return [results[place] for place in range(len(questions))]


def force_slowly(engine: Engine, memory: Memory, questions: Sequence[Question]) -> list[Forced]:
    """The same token by token, each question on a fork, as where entries are recalled for each.

    A question is read in one pass. Nothing is dropped on the way.
    """
    wrap, results = memory.conversation.question_prompt, list[Forced]()
    for question in questions:
        cache, match = memory.recall(question.question)
        fork = cache.fork()
        given = engine.scribe.question(wrap.format(question=question.question))
        hits, likelihoods = list[bool](), list[float]()
        for token in _ending(engine, question.answer):
            row = Row(fork, given)
            logits = engine.loaded.decoder.predict([row], Mode.APPEND, [len(given) - 1])[0]
            hits.append(int(logits.argmax()) == token)
            likelihoods.append(float(logits.log_softmax(0)[token]))
            given = (token,)
        episode = None if match is None else match.episode
        results.append(Forced(question, tuple(hits), tuple(likelihoods), episode))
    return results


def _ending(engine: Engine, answer: str) -> tuple[int, ...]:
    """The answer's tokens and the one that ends the turn."""
    return engine.scribe.encode(answer) + engine.scribe.closing()[:1]


def _groups(sections: Sequence[_Section]) -> Iterator[list[_Section]]:
    group: list[_Section] = []
    for section in sections:
        if group and sum(map(len, group)) + len(section) > PASS_TOKENS:
            yield group
            group = []
        group.append(section)
    if group:
        yield group


def _pass(
    engine: Engine, cache: SequenceCache, group: Sequence[_Section]
) -> Iterator[tuple[_Section, tuple[bool, ...], tuple[float, ...]]]:
    """Read a group over one cache; the last token of an answer is only predicted."""
    ids = tuple(token for section in group for token in (section.prompt + section.answer)[:-1])
    row, wanted, first = Row(cache, ids, tuple(map(len, group))), list[int](), 0
    for section in group:
        stop = first + len(section)
        wanted += range(stop - len(section.answer), stop)
        first = stop
    logits = engine.loaded.decoder.predict([row], Mode.SCRATCH, wanted)
    parts = logits.split([len(section.answer) for section in group])
    for section, part in zip(group, parts, strict=True):
        expected = torch.tensor(section.answer, device=part.device)
        likelihoods = part.log_softmax(-1).gather(1, expected[:, None])[:, 0]
        hits = part.argmax(-1) == expected
        yield section, tuple(hits.tolist()), tuple(likelihoods.tolist())
