"""Reminders are recited in their order, and answers are split into items."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from larder import Conversation, read_conversation
from larder.core import BadParameter
from larder_bench.datasets.lifelog_sessions import count_message_tokens
from larder_bench.scoring.answer_items import numbered_item_spans
from larder_bench.tasks.recite import recital_conversation


def words(text: str) -> int:
    return len(text.split())


def reminders_in(conversation: Conversation) -> dict[int, str]:
    reminders = (re.search(r" Reminder (\d+): (.+)\.$", m.content) for m in conversation.messages)
    return {int(found[1]): found[2] for found in reminders if found}


def slow_items(answer: str) -> list[str]:
    """Items found word by word: one starts at a number with a colon after the end of another
    item.
    """
    items, before = [""], ""
    for word in answer.split(" "):
        if before.endswith(".") and re.fullmatch(r"\d+:", word):
            items.append("")
        items[-1] += f" {word}"
        before = word
    return [item.strip() for item in items]


@pytest.mark.parametrize("items", [1, 7, 100])
def test_all_reminders_are_asked_for_once_and_in_order(items: int) -> None:
    conversation = recital_conversation(0, 700, words, items)
    reminders = reminders_in(conversation)
    assert list(reminders) == list(range(1, len(reminders) + 1))
    asked: list[int] = []
    for question in conversation.questions:
        found = re.fullmatch(r"Recite reminders (\d+) to (\d+)\.", question.question)
        assert found
        run = range(int(found[1]), int(found[2]) + 1)
        assert question.answer == " ".join(f"{n}: {reminders[n]}." for n in run)
        assert 1 <= len(run) <= items
        asked += run
    assert asked == list(reminders)


def test_items_equal_the_reference() -> None:
    (question,) = recital_conversation(1, 700, words, 100).questions
    spans = numbered_item_spans(question.answer)
    items = [question.answer[start:stop].strip() for start, stop in spans]
    assert items == slow_items(question.answer)
    assert len(items) > 10
    assert spans[0][0] == 0 and spans[-1][1] == len(question.answer)
    assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]


def test_item_spans_hand_values() -> None:
    assert numbered_item_spans("1: at 5: or 6. 2: on May 3.") == ((0, 14), (14, 27))
    assert numbered_item_spans("4: alone.") == ((0, 9),)


def test_wording_equals_the_training_data(shared_data: Path) -> None:
    paths = sorted((shared_data / "dialogues").glob("recite-1500-*.json"))
    assert paths
    for path in paths:
        conversation = read_conversation(path)
        reminders = reminders_in(conversation)
        for question in conversation.questions:
            first, last = map(int, re.findall(r"\d+", question.question))
            assert question.question == f"Recite reminders {first} to {last}."
            run = [f"{n}: {reminders[n]}." for n in range(first, last + 1)]
            assert slow_items(question.answer) == run


@pytest.mark.parametrize("tokens", [200, 1500])
def test_token_limit_is_nearly_reached(tokens: int) -> None:
    taken = count_message_tokens(recital_conversation(2, tokens, words).messages, words)
    assert tokens - 60 < taken <= tokens


def test_equal_seeds_give_equal_conversations() -> None:
    assert recital_conversation(5, 400, words) == recital_conversation(5, 400, words)
    assert recital_conversation(5, 400, words) != recital_conversation(6, 400, words)


@pytest.mark.parametrize(("tokens", "items"), [(5, 3), (500, 0)])
def test_parameters_out_of_range_are_refused(tokens: int, items: int) -> None:
    with pytest.raises(BadParameter, match="recite.(tokens|items)"):
        recital_conversation(0, tokens, words, items)
