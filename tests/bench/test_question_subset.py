"""Subsets of another task's questions: by kind, by number of sources, by similarity to episodes."""

from __future__ import annotations

import numpy as np
import pytest

from bench.corpus_files import sources
from larder import Question
from larder.core import BadParameter, TooLittle
from larder.session import cluster, cut_segments
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks import base
from larder_bench.tasks.base import parse_task

TOKENS = 900


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> TaskSources:
    return sources(tmp_path_factory.mktemp("material"))


def made(sentence: str, material: TaskSources, seed: int = 1) -> tuple[Question, ...]:
    return parse_task(sentence).make(seed, TOKENS, material).questions


def test_subset_has_questions_of_the_named_kinds_only(material: TaskSources) -> None:
    asked = made('only(kinds="twohop,list")', material)
    assert asked and {question.kind for question in asked} <= {"twohop", "list"}
    assert set(asked) < set(made("lifelog()", material)) or len(asked) < 24


@pytest.mark.parametrize(("of", "indices"), [("realtalk()", 1), ("realtalk()", 3), ("locomo()", 3)])
def test_subset_has_questions_of_the_named_number_of_sources(
    of: str, indices: int, material: TaskSources
) -> None:
    whole = parse_task(of).make(0, 3000, material)
    asked = parse_task(f"only(of={of!r}, sources={indices})").make(0, 3000, material)
    assert asked.messages == whole.messages
    # Of every third session three places are named, one of them a range; one question names none.
    expected = [q for q in whole.questions if q.sources == indices]
    assert list(asked.questions) == expected and len(expected) == (7 if indices == 1 else 3)


def test_lifelog_questions_count_the_messages_of_their_answer(material: TaskSources) -> None:
    conversation = parse_task('lifelog(questions=60, kinds="list,twohop")').make(0, 4000, material)
    found = {question.kind: set[int | None]() for question in conversation.questions}
    for question in conversation.questions:
        found[question.kind].add(question.sources)
        if question.kind == "list":
            assert question.sources == len(question.answer.split("; "))
    assert found["twohop"] == {2} and {1, 2, 3} <= found["list"]


@pytest.mark.extended
def test_single_and_cross_episode_questions_are_two_halves(material: TaskSources) -> None:
    whole = parse_task("lifelog()").make(1, TOKENS, material)
    single = made('only(episodes="single")', material)
    cross = made('only(episodes="cross")', material)
    assert set(single) | set(cross) == set(whole.questions) and not set(single) & set(cross)
    assert abs(len(single) - len(cross)) <= 1
    embedder = material.embedder("minilm")
    rows = embedder.embed_segments([segment.text for segment in cut_segments(whole)])
    centroids = cluster(rows, 4).centroids

    def lead(question: Question) -> float:
        asked = embedder.embed_questions([question.question])[0]
        first, second = sorted(float(asked @ one / np.linalg.norm(one)) for one in centroids)[
            :-3:-1
        ]
        return first - second

    assert min(map(lead, single)) > max(map(lead, cross))


def test_missing_question_kind_is_refused(
    material: TaskSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MAX_RETRIES", 2)
    with pytest.raises(TooLittle, match="has no such questions at 900 tokens"):
        made('only(kinds="riddle")', material)


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("only(sources=4)", "only.sources must be 1 to 3, got 4"),
        ("only(count=1)", "only.count must be 2 or more"),
        ('only(of="turns()")', "only.of must be a task with independent questions"),
        ('only(episodes="many")', "only.episodes must be one of 'any'"),
        ('only(embedder="tokens")', "take minilm"),
    ],
)
def test_invalid_spellings_are_refused(sentence: str, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        parse_task(sentence)
