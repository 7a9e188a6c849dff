"""Public data sets are read from their folders, and errors name what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.corpus_files import (
    documents,
    lines_written,
    paragraphs,
    sources,
    stacked,
    words,
    written,
)
from larder import Conversation, read_conversation
from larder.core import InputError, PromptLayout, TooLittle
from larder_bench.datasets.conversation_file import conversation_json
from larder_bench.datasets.documents import head_tokens, tail_tokens, truncate_middle
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import parse_task


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> TaskSources:
    return sources(tmp_path_factory.mktemp("material"))


def text_of(conversation: Conversation) -> str:
    return "".join(message.content for message in conversation.messages)


def data_of(material: TaskSources, name: str) -> dict[str, object]:
    assert material.data
    (path,) = (material.data / name).glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["locomo", "realtalk"])
@pytest.mark.parametrize("tokens", [120, 400, 1000, 3000])
def test_questions_are_answered_by_the_text(name: str, tokens: int, material: TaskSources) -> None:
    for seed in range(3):
        made = parse_task(name).make(seed, tokens, material)
        text, whole = text_of(made), len(made.messages) == 140
        result = set(re.findall(r"word\d+x\d+", text))
        expected = set()
        for entry in data_of(material, name)["qa"]:  # type: ignore[attr-defined]
            wanted = {
                "word{}x{}".format(*p) for p in re.findall(r"D(\d+):(\d+)", str(entry["evidence"]))
            }
            if entry["category"] != 5 and wanted <= result and (wanted or whole):
                expected.add(entry["question"])
                (question,) = [q for q in made.questions if q.question == entry["question"]]
                assert question.answer == entry["answer"]
                assert (question.depth is not None) == (len(wanted) == 1)
                if question.depth is not None:
                    start = round(question.depth * len(text))
                    assert wanted == set(re.findall(r"word\d+x\d+", text[start:])[:1])
        assert {q.question for q in made.questions} == expected
        assert made.form is PromptLayout.TRANSCRIPT and "{question}" in made.question_prompt
        assert text.startswith("DATE: ")
        assert whole == (tokens == 3000)


def test_question_count_is_limited(material: TaskSources) -> None:
    everything = parse_task("locomo").make(0, 3000, material).questions
    some = parse_task("locomo(questions=3)").make(0, 3000, material).questions
    assert len(everything) == 11 and len(set(some) & set(everything)) == len(some) == 3


def test_data_without_answerable_questions_is_refused(material: TaskSources) -> None:
    with pytest.raises(
        TooLittle, match="locomo.tokens must hold the evidence of a question, got 42"
    ):
        parse_task("locomo").make(0, 42, material)


@pytest.mark.parametrize("seed", range(3))
def test_stacked_text_has_the_evidence(seed: int, material: TaskSources) -> None:
    made = parse_task("stacked(questions=4)").make(seed, 500, material)
    text, entries = text_of(made), {str(stacked(n)["question"]): stacked(n) for n in range(8)}
    assert len(made.questions) == 4
    for question in made.questions:
        entry = entries[question.question]
        assert (question.answer, question.kind) == (entry["answer"], entry["question_type"])
        assert text.count(f"is {question.answer}.") == 2
    assert len(re.findall(r"is N\d", text)) == 8  # no evidence of what is not asked
    dates = [message.date for message in made.messages if message.role == "system"]
    assert dates == sorted(dates) and len(dates) > 10
    numbers = [int(n) for n in re.findall(r"Session (\d+), ", text)]
    assert numbers == list(range(1, len(dates) + 1))


def test_document_is_truncated_in_the_middle(material: TaskSources) -> None:
    for name in ("longbench", "infinitebench"):
        made, whole = (parse_task(name).make(1, tokens, material) for tokens in (300, 9000))
        text, context = text_of(made), documents("answer")[1]["context"]
        assert text_of(whole) == context
        assert context.startswith(text[:300]) and context.endswith(text[-300:])
        assert 270 < words(text) < 300
        (question,) = made.questions
        assert question.question == "Which document is number 1?"
        assert (question.answer, question.others) == ("document 1", ("the document 1",))


@pytest.mark.parametrize("seed", range(3))
def test_paragraphs_of_every_asked_question_are_in_the_text(
    seed: int, material: TaskSources
) -> None:
    made = parse_task("qa(questions=5)").make(seed, 700, material)
    text, samples = text_of(made), {str(one["question"]): one for one in map(paragraphs, range(40))}
    assert len(made.questions) == 5
    for question in made.questions:
        sample = samples[question.question]
        assert [question.answer, *question.others] == sample["answers"]
        assert all(text.count(one) == 1 for one in sample["context"])
        assert (question.depth is None) == (len(sample["context"]) == 2)
    numbers = [int(number) for number in re.findall(r"^Document (\d+):$", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 15


def test_paragraphs_come_from_the_file_that_is_named(tmp_path: Path) -> None:
    material, task = TaskSources(words, data=tmp_path), parse_task("qa(questions=1)")
    (tmp_path / "ruler_qa").mkdir()
    with pytest.raises(InputError, match="it holds no .jsonl file at all"):
        task.make(0, 300, material)
    for name in ("hotpotqa", "squad"):
        lines_written(tmp_path / "ruler_qa" / f"{name}.jsonl", [paragraphs(1)])
    with pytest.raises(InputError, match="it holds hotpotqa, squad"):
        task.make(0, 300, material)
    made = parse_task('qa(questions=1, set="squad")').make(0, 300, material)
    assert made.questions[0].answer == "P0"
    lines_written(tmp_path / "ruler_qa" / "bare.jsonl", [{**paragraphs(1), "answers": []}])
    with pytest.raises(InputError, match="lists of 'answers' and of 'context'"):
        parse_task('qa(set="bare")').make(0, 300, material)


def test_seeds_select_samples_in_turn(material: TaskSources) -> None:
    asked = [parse_task("longbench").make(seed, 300, material).questions[0] for seed in range(4)]
    assert asked[0] == asked[3] != asked[1] != asked[2]


def test_prompts_of_the_release_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "longbench"
    lines_written(folder / "hotpotqa_e.jsonl", documents("answers"))
    prompts = {"hotpotqa": "Read {it}.\n{context}\n\nNow: {input} {x}\nAnswer:"}
    written(folder / "config" / "dataset2prompt.json", prompts)
    made = parse_task('longbench(set="hotpotqa_e")').make(0, 300, TaskSources(words, data=tmp_path))
    asked = made.question_prompt.format(question=made.questions[0].question)
    assert made.opening == "Read {it}.\n"
    assert asked == "Now: Which document is number 0? {x}\nAnswer:"
    with pytest.raises(InputError, match="no prompt for 'lcc'"):
        lines_written(folder / "lcc.jsonl", documents("answers"))
        parse_task('longbench(set="lcc")').make(0, 300, TaskSources(words, data=tmp_path))


def test_dataset_without_question_texts_uses_default_wording(tmp_path: Path) -> None:
    samples = [{**document, "input": ""} for document in documents("answers")]
    lines_written(tmp_path / "longbench" / "gov_report_e.jsonl", samples)
    made = parse_task('longbench(set="gov_report_e")').make(
        0, 300, TaskSources(words, data=tmp_path)
    )
    assert made.questions[0].question == "Summarize the text on one page."
    assert made.question_prompt == "{question}"


@pytest.mark.parametrize("answer", [["beta"], ["beta", "B"], "beta", "B"])
def test_multiple_choice_expects_a_letter(answer: object, tmp_path: Path) -> None:
    sample = {
        "context": "One. Two.",
        "input": "Which?",
        "answer": answer,
        "options": ["alpha", "beta"],
    }
    lines_written(tmp_path / "infinitebench" / "longbook_choice_eng.jsonl", [sample])
    task = parse_task('infinitebench(set="longbook_choice_eng")')
    made = task.make(0, 300, TaskSources(words, data=tmp_path))
    (question,) = made.questions
    assert question.question == "Which?\nA. alpha\nB. beta"
    assert (question.answer, question.others) == ("B", ("beta",))
    assert "one letter" in made.question_prompt


@pytest.mark.parametrize(
    ("name", "answer", "expected", "others"),
    [("math_calc", [1, 2], "[1, 2]", ()), ("math_find", 7, "7", ()), ("code_run", [3], "3", ())],
)
def test_numeric_answers_are_accepted(
    name: str, answer: object, expected: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    sample = {"id": 0, "context": "1 + 1", "input": "Now", "answer": answer, "options": []}
    lines_written(tmp_path / "infinitebench" / f"{name}.jsonl", [sample])
    made = parse_task(f'infinitebench(set="{name}")').make(
        0, 300, TaskSources(words, data=tmp_path)
    )
    assert (made.questions[0].answer, made.questions[0].others) == (expected, others)


@pytest.mark.parametrize("of", ["talk", "prose", "files"])
def test_continuation_answer_follows_the_text(of: str, material: TaskSources) -> None:
    task = parse_task(f'text(of="{of}", following=20)')
    made, longer = task.make(1, 200, material), task.make(1, 260, material)
    (question,) = made.questions
    assert words(question.answer) == 20 and made.form is PromptLayout.DOCUMENT
    together = f"{text_of(made)} {question.answer}".split()
    assert together == text_of(longer).split()[: len(together)]


ALONE = 'infinitebench(set="a")'
WRONG = [
    ("longbench/a.jsonl", "{}", 'longbench(set="b")', "holds no b.jsonl: it holds a"),
    ("longbench/a.jsonl", "", 'longbench(set="a")', "a.jsonl is empty"),
    ("longbench/a.jsonl", "[1]", 'longbench(set="a")', "entry 1 must be an object"),
    ("longbench/a.jsonl", "{", 'longbench(set="a")', "cannot be read as lines of JSON"),
    ("longbench/a.jsonl", '{"input": "?"}', 'longbench(set="a")', "has no 'context'"),
    ("infinitebench/a.jsonl", '{"context": "", "input": "", "answer": 3}', ALONE, "an 'input'"),
    ("longmemeval/a.txt", "", "stacked", "must hold one .json file"),
    ("longmemeval/a.json", "[{}]", "stacked", "has no 'haystack_session_ids'"),
    ("longmemeval/a.json", "]", "stacked", "cannot be read as JSON"),
    ("locomo/a.txt", "", "locomo", "must hold transcripts as .json files"),
    (
        "locomo/a.json",
        '{"messages": [{"role": "user", "content": "."}]}',
        "locomo",
        "not a transcript",
    ),
    ("text/a.pdf", "", 'text(of="files")', "must hold texts as .txt or .md"),
]


@pytest.mark.parametrize(("path", "content", "sentence", "message"), WRONG)
def test_invalid_data_is_refused(
    path: str, content: str, sentence: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(content)
    with pytest.raises(InputError, match=message):
        parse_task(sentence).make(0, 300, TaskSources(words, data=tmp_path))


@pytest.mark.parametrize("name", ["locomo", "longbench", "lookup"])
def test_written_file_has_the_model_input(name: str, material: TaskSources, tmp_path: Path) -> None:
    made = parse_task(name).make(0, 400, material)
    path = tmp_path / "made.json"
    path.write_text(conversation_json(made), encoding="utf-8")
    read = read_conversation(path)
    assert text_of(read).startswith(made.opening + text_of(made))
    assert [message.role for message in read.messages] == ["user", "assistant"]
    for question, asked in zip(read.questions, made.questions, strict=True):
        assert question.question == made.question_prompt.format(question=asked.question)
        assert question.answer == asked.answer


@pytest.mark.parametrize("tokens", [0, 1, 7, 300, 999, 5000])
def test_truncations_are_as_long_as_the_limit_allows(tokens: int) -> None:
    text = "\n\n".join(f"Line {n} is here." for n in range(250))
    assert (
        words(head_tokens(text, tokens, words))
        == words(tail_tokens(text, tokens, words))
        == min(tokens, 1000)
    )
    assert text.startswith(head_tokens(text, tokens, words)) and text.endswith(
        tail_tokens(text, tokens, words)
    )
    if tokens >= 7:
        cut = truncate_middle(text, tokens, words)
        assert cut == text if tokens >= 1000 else tokens - 2 <= words(cut) <= tokens


def test_missing_answers_are_refused(tmp_path: Path) -> None:
    sample = {"context": "c", "input": "?", "answer": "z", "answers": 3, "options": ["y"]}
    for name, message in [("longbench", "a list of 'answers'"), ("infinitebench", "its options")]:
        lines_written(tmp_path / name / "a.jsonl", [sample])
        with pytest.raises(InputError, match=message):
            parse_task(f'{name}(set="a")').make(0, 300, TaskSources(words, data=tmp_path))


def test_languages_without_spaces_are_cut_within_words() -> None:
    assert len(head_tokens("字" * 1000, 100, len)) == 96
