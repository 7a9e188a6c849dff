"""Metrics of public data sets equal their released code, except where documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.corpus_files import chosen, documents, lines_written, words, written
from larder import Question
from larder.core import BadParameter, InputError
from larder_bench.datasets.sources import TaskSources
from larder_bench.scoring.dataset_metrics import SCORERS, dataset_score
from larder_bench.scoring.item_scores import NumberedQuestion, generated_items
from larder_bench.tasks import infinitebench, longbench
from larder_bench.tasks.base import TASKS, parse_task


@pytest.mark.parametrize(
    ("scorer", "answer", "expected", "score"),
    [
        ("f1", "The red, red cat!", "a red cat", 0.8),
        ("f1", "", "a red cat", 0.0),
        ("f1_of_line", "\n\nred cat\ndog dog", "red cat", 1.0),
        ("f1_characters", "红 猫。", "红狗", 0.5),
        # The longest common subsequence of "the cat sat down" and "the dog sat" has two words.
        ("rouge_l", "The cat sat down.", "the dog sat", 2 * 2 / 7),
        ("rouge_l", "sat the", "the dog sat", 2 * 1 / 5),
        ("rouge_l_of_line", "the dog\nsat", "the dog sat", 2 * 2 / 5),
        # By lines, each expected line is covered by both that were said.
        ("rouge_l_sum", "sat\nthe", "the dog sat", 2 * 2 / 5),
        ("rouge_l_characters", "红色的猫", "红猫", 2 * 2 / 6),
        ("rouge_l_characters", "猫红", "红猫", 0.5),
        ("edit_similarity", "\n# a comment\nx = 12\ny = 3", "x = 1", 10 / 11),
        ("edit_similarity", "```", "x = 1", 0.0),
        ("share_of_numbers", "Paragraph 7, not 17", "Paragraph 7", 0.5),
        ("share_of_numbers", "none", "Paragraph 7", 0.0),
        ("share_of_numbers", "段落7", "段落7", 1.0),
        ("first_digits", "The key is 00123, not 5.", "00123", 1.0),
        ("first_digits", "It is 123.", "00123", 0.0),
        ("first_number", "It is 7.50 or 8", "7.5", 1.0),
        ("first_number", "none", "7.5", 0.0),
        ("last_number", "Step 2 gives: `-3`.", "-3", 1.0),
        ("last_number", "-3 or 4", "-3", 0.0),
        ("numbers_in_a_row", "1, 2, 9, 4", "[1, 2, 3, 4]", 0.5),
        ("numbers_in_a_row", "1, 2", "[1, 2, 3, 4]", 0.5),
        ("numbers_in_a_row", "1, 2, 3, 4, 5", "[1, 2, 3, 4]", 1.0),
        ("among_words", 'the value is: "ab-1".', "ab-1", 1.0),
        ("among_words", "ab-12", "ab-1", 0.0),
        ("choice", "The correct answer is (B).", "B", 1.0),
        ("choice", "Not A: the answer is B", "B", 1.0),
        ("choice", "B. red", "B", 1.0),
        ("choice", "Because of D", "B", 0.0),
        ("choice", "The answer is a cat", "A", 0.0),
        ("choice", "get_name", "get_name", 1.0),
        ("choice", "", "B", 0.0),
    ],
)
def test_scorer_hand_values(scorer: str, answer: str, expected: str, score: float) -> None:
    question = Question("?", expected, scorer=scorer)
    assert dataset_score(answer, question) == pytest.approx(score)
    nearest = Question("?", "something else 99", scorer=scorer, others=(expected,))
    if scorer != "first_number":
        assert dataset_score(answer, nearest) >= dataset_score(answer, question)


def test_classes_are_those_that_the_first_line_names() -> None:
    question = Question("?", "Food", scorer="classes", classes=("Food", "Foo", "Date", "City"))
    for answer, score in (("Food", 1.0), ("Food or City", 0.5), ("City\nFood", 0.0), ("", 0.0)):
        assert dataset_score(answer, question) == score


def test_every_set_has_a_known_scorer() -> None:
    for table in (longbench.SET_METRICS, infinitebench.SET_METRICS):
        assert set(table.values()) <= {*SCORERS, "classes"}
    assert (len(longbench.SET_METRICS), len(infinitebench.SET_METRICS)) == (21, 12)


def test_generated_answer_is_scored_by_its_set(tmp_path: Path) -> None:
    samples = [
        {**one, "answers": ["Food"], "all_classes": ["Food", "City"]}
        for one in documents("answers")
    ]
    lines_written(tmp_path / "longbench" / "trec_e.jsonl", samples)
    made = parse_task('longbench(set="trec_e")').make(0, 300, TaskSources(words, data=tmp_path))
    [item] = generated_items(NumberedQuestion(made.questions[0], 0, 0), "City, Food")
    assert (item["own"], item["scored_by"], item["exact"]) == (0.5, "classes", False)
    [plain] = generated_items(NumberedQuestion(Question("?", "a"), 0, 0), "a")
    assert "own" not in plain


def test_longbench_v2_questions_expect_one_of_four_letters(tmp_path: Path) -> None:
    path = tmp_path / "longbench_v2" / "data.json"
    written(path, [chosen(number) for number in range(3)])
    material = TaskSources(words, data=tmp_path)
    [question] = parse_task("longbench_v2").make(1, 300, material).questions
    assert question.question.splitlines() == [
        "Which document is number 1?",
        *(f"{letter}. {letter.lower()}1" for letter in "ABCD"),
    ]
    assert (question.answer, question.kind, question.scorer) == ("B", "hard short", "choice")
    easy = parse_task('longbench_v2(difficulty="easy")')
    asked = [easy.make(seed, 300, material).questions[0].answer for seed in range(3)]
    assert asked == ["A", "C", "A"]
    with pytest.raises(InputError, match="no sample of difficulty 'easy' and length 'long'"):
        parse_task('longbench_v2(difficulty="easy", length="long")').make(0, 300, material)
    with pytest.raises(BadParameter, match="must be one of '', 'easy', 'hard', got 'heavy'"):
        TASKS.load("longbench_v2")(difficulty="heavy")
    written(path, [chosen(0) | {"answer": "E"}])
    with pytest.raises(InputError, match="one of A to D"):
        parse_task("longbench_v2").make(0, 300, TaskSources(words, data=tmp_path))
    path.unlink()
    with pytest.raises(InputError, match=r"must hold the release's data\.json"):
        parse_task("longbench_v2").make(0, 300, TaskSources(words, data=tmp_path))
