"""Questions about bookings have exactly one answer in the conversation's dialogues."""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from larder import Conversation
from larder.core import BadParameter, InputError
from larder_bench.datasets.corpus import Dialogue, read_dialogues, read_prose, sentences_of_prose
from larder_bench.datasets.dialogue_corpus import bookings_conversation
from larder_bench.datasets.lifelog_sessions import count_message_tokens

CITIES = ("Bern", "Lyon", "Oslo", "Rome", "Turin", "Vienna")
FORMS = (
    r"For the (?P<n>.+) whose (?P<s>.+) was (?P<v>.+), what was the (?P<w>.+)\?",
    r"What was the (?P<w>.+) of the (?P<n>hotel|train) with (?P<s>city|day|seats) (?P<v>.+)\?",
    r"Remind me of the (?P<w>.+) of the (?P<n>.+) \((?P<s>.+): (?P<v>.+)\)\.",
)
WHEN = r"In which session did we talk about the (?P<n>.+) whose (?P<s>.+) was (?P<v>.+)\?"


def words(text: str) -> int:
    return len(text.split())


def packed(path: Path, lines: list[object]) -> Path:
    with lzma.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    return path


@pytest.fixture
def dialogues(tmp_path: Path) -> tuple[Dialogue, ...]:
    lines: list[object] = [{"turns": [["user", "Nothing."]], "facts": []}]
    for number, city in enumerate(CITIES * 2):
        noun = "hotel" if number % 3 else "train"
        slots = {"city": city, "day": f"May {number}", "seats": str(number % 4)}
        statement = ", ".join(f"{slot} {value}" for slot, value in slots.items())
        facts = [
            {"noun": noun, "slot": slot, "value": slots[slot], "keys": _others(slots, slot)}
            for slot in slots
        ]
        turns = [["user", f"A {noun}: {statement}."], ["assistant", f"Booked, number {number}."]]
        lines.append({"turns": turns, "facts": facts})
    return read_dialogues(packed(tmp_path / "dialogues.jsonl.xz", lines))


def _others(slots: dict[str, str], left_out: str) -> list[list[str]]:
    return [[slot, value] for slot, value in slots.items() if slot != left_out]


def told_in(conversation: Conversation) -> list[tuple[int, str, dict[str, str]]]:
    """Session, noun and slots of every booking in the text."""
    found, session = [], 0
    for message in conversation.messages:
        if header := re.match(r"Session (\d+), ", message.content):
            session = int(header[1])
        if statement := re.fullmatch(r"A (hotel|train): (.+)\.", message.content):
            slots = dict(part.split(" ", 1) for part in statement[2].split(", "))
            found.append((session, statement[1], slots))
    return found


@pytest.mark.parametrize(("share", "tokens"), [(1.0, 420), (0.5, 1500)])
def test_every_answer_is_in_one_dialogue(
    dialogues: tuple[Dialogue, ...], share: float, tokens: int
) -> None:
    asked = Counter[str]()
    for seed in range(4):
        conversation = bookings_conversation(seed, tokens, words, dialogues, 8, share)
        result = told_in(conversation)
        for question in conversation.questions:
            asked[question.kind] += 1
            forms = FORMS if question.kind == "booking" else (WHEN,)
            matches = [re.fullmatch(form, question.question) for form in forms]
            (match,) = [m for m in matches if m] or [None]
            if match is None:
                continue  # of the life-log, whose questions have tests of their own
            (hit,) = [t for t in result if t[1] == match["n"] and t[2][match["s"]] == match["v"]]
            wanted = hit[2][match["w"]] if question.kind == "booking" else f"session {hit[0]}"
            assert question.answer == wanted
    assert asked["booking"] and asked["bksession"]
    assert (asked["single"] > 0) == (share < 1)
    assert asked["booking"] + asked["bksession"] == 32 * share


def test_dialogues_without_questions_are_skipped(dialogues: tuple[Dialogue, ...]) -> None:
    assert len(dialogues) == len(CITIES) * 2


def test_sessions_are_numbered_and_within_the_bound(dialogues: tuple[Dialogue, ...]) -> None:
    conversation = bookings_conversation(0, 1500, words, dialogues, 4, 0.5)
    headers = [m.content for m in conversation.messages if m.role == "system"]
    numbers = [int(re.findall(r"^Session (\d+),", header)[0]) for header in headers]
    assert numbers == list(range(1, len(headers) + 1))
    assert 1400 < count_message_tokens(conversation.messages, words) <= 1500
    assert conversation == bookings_conversation(0, 1500, words, dialogues, 4, 0.5)


@pytest.mark.parametrize(
    ("tokens", "questions", "share", "message"),
    [
        (400, 4, 0.0, "share must be in"),
        (5, 4, 1.0, "must hold sessions"),
        (60, 500, 1.0, "can be distinguished"),
    ],
)
def test_parameters_out_of_range_are_refused(
    dialogues: tuple[Dialogue, ...], tokens: int, questions: int, share: float, message: str
) -> None:
    with pytest.raises(BadParameter, match=message):
        bookings_conversation(0, tokens, words, dialogues, questions, share)


def test_prose_is_drawn_in_whole_sentences(tmp_path: Path) -> None:
    text = ". ".join(f"Sentence {n}\nof many" for n in range(200)) + "."
    texts = read_prose(packed(tmp_path / "prose.jsonl.xz", [text]))
    drawn = sentences_of_prose(texts, Random(0))
    for _ in range(500):
        assert re.fullmatch(r"Sentence \d+ of many\.", next(drawn))


@pytest.mark.parametrize("content", [None, b"plain"])
def test_unreadable_corpus_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "prose.jsonl.xz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"prose\.jsonl\.xz cannot be read"):
        read_prose(path)
