"""Contract of every task of the family, and spelling of tasks."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from bench.corpus_files import sources, words
from larder import Conversation, LarderError
from larder.cli.part_docs import citations
from larder.core import BadParameter, PromptLayout, SpellingError, UnknownName, UsageError, spell
from larder_bench.datasets.lifelog_sessions import count_message_tokens
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks import base
from larder_bench.tasks.base import TASKS, BenchTask, QuestionStyle, parse_task

TOKENS = 900
NAMES = TASKS.names()


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> TaskSources:
    return sources(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def made(material: TaskSources) -> dict[str, Conversation]:
    return {name: parse_task(name).make(1, TOKENS, material) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_give_equal_conversations(
    name: str, material: TaskSources, made: dict[str, Conversation]
) -> None:
    assert parse_task(name).make(1, TOKENS, material) == made[name]
    assert parse_task(name).make(2, TOKENS, material).messages != made[name].messages
    assert made[name].name == f"{name}-{TOKENS}-1"


@pytest.mark.parametrize("name", NAMES)
def test_token_limit_is_nearly_reached(name: str, made: dict[str, Conversation]) -> None:
    messages, opening = made[name].messages, made[name].opening
    taken = count_message_tokens(messages, words)
    if made[name].form is not PromptLayout.CHAT:
        taken = words(opening + "".join(message.content for message in messages))
    assert 0.7 * TOKENS < taken <= TOKENS


@pytest.mark.parametrize("name", NAMES)
def test_questions_are_distinct_and_have_answers(name: str, made: dict[str, Conversation]) -> None:
    questions = made[name].questions
    assert questions and len({question.question for question in questions}) == len(questions)
    text = "".join(message.content for message in made[name].messages)
    for question in questions:
        assert question.question and question.answer and question.kind
        edges = [(0, 0), *question.items, (len(question.answer),) * 2]
        for (_, stop), (start, _) in zip(edges, edges[1:], strict=False):
            assert not question.items or question.answer[stop:start] in ("", ",")
        if question.depth is not None and question.answer in text:
            behind = text[round(question.depth * len(text)) :]
            assert question.answer.lower() in behind.lower()


@pytest.mark.parametrize("name", NAMES)
def test_every_task_spelling_round_trips(name: str) -> None:
    task = parse_task(name)
    assert parse_task(spell(task)) == task
    assert spell(task).startswith(f"{name}(")
    assert isinstance(task.style, QuestionStyle)
    docstring = importlib.import_module(f"larder_bench.tasks.{name}").__doc__ or ""
    assert citations(docstring) or "No paper" in docstring


@pytest.mark.parametrize("name", NAMES)
def test_studies_page_lists_every_task(name: str) -> None:
    page = Path(__file__).resolve().parents[2] / "studies" / "README.md"
    assert re.search(rf"^\| [^|]*`{name}`[^|]* \|", page.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_hold_every_question(name: str, made: dict[str, Conversation]) -> None:
    task, questions = parse_task(name), made[name].questions
    sequences = task.question_sequences(questions)
    assert sum(sequences, ()) == questions
    if task.style in (QuestionStyle.INDEPENDENT, QuestionStyle.RECITAL):
        assert all(len(sequence) == 1 for sequence in sequences)
    if task.style is QuestionStyle.TURNS:
        assert len(sequences) == 1


@pytest.mark.parametrize("name", NAMES)
def test_too_few_tokens_are_refused(
    name: str, material: TaskSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MAX_RETRIES", 2)
    with pytest.raises(BadParameter, match=r"token|question|hold"):
        parse_task(name).make(0, 12, material)


@pytest.mark.parametrize("name", NAMES)
def test_counts_must_be_positive(name: str) -> None:
    task = parse_task(name)
    for parameter, value in vars(task).items():
        if isinstance(value, int):
            with pytest.raises(BadParameter, match=rf"{name}\.{parameter} must be .*got -1"):
                parse_task(f"{name}({parameter}=-1)")


def test_missing_folders_are_refused(material: TaskSources) -> None:
    bare = TaskSources(material.count_tokens)
    with pytest.raises(UsageError, match="--corpus FOLDER"):
        parse_task("bookings").make(0, TOKENS, bare)
    with pytest.raises(UsageError, match="--corpus FOLDER"):
        parse_task('needles(hay="prose")').make(0, TOKENS, bare)
    with pytest.raises(UsageError, match="--data FOLDER"):
        bare.folder("locomo")
    with pytest.raises(UsageError, match="must contain a folder 'locomo'"):
        TaskSources(material.count_tokens, data=Path("nowhere")).folder("locomo")


@pytest.mark.parametrize(
    ("sentence", "error", "message"),
    [
        ("nedles", UnknownName, "Did you mean 'needles'"),
        ("needles(", SpellingError, "The task 'needles\\('"),
        ("needles() > recite()", SpellingError, "is not one task"),
        ('needles(kind="hay")', BadParameter, "needles.kind must be one of 'magic'"),
        ("needles(pins=3)", UnknownName, "no parameter 'pins'"),
        ('lifelog(kinds="riddle")', BadParameter, "lifelog.kinds must name some of"),
    ],
)
def test_invalid_spellings_are_refused(
    sentence: str, error: type[LarderError], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse_task(sentence)


def test_abstract_task_cannot_be_instantiated(material: TaskSources) -> None:
    with pytest.raises(TypeError, match="abstract"):
        BenchTask()  # pyright: ignore[reportAbstractUsage]
