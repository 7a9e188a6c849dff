"""Every needle appears once in its text and answers its question, with the training data's
wording.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import pytest

from larder import Conversation, read_conversation
from larder.core import BadParameter, UnknownName
from larder_bench.datasets.corpus import sentences_of_small_talk
from larder_bench.datasets.grammar import load_grammar
from larder_bench.datasets.haystack import KINDS, needles_conversation
from larder_bench.datasets.lifelog_sessions import count_message_tokens

NUMBER = r"(?:[A-Z]{2})?\d+"
LINES = {
    "magic": rf"One of the special magic numbers for (?P<key>[\w ]+) is: (?P<value>{NUMBER})\.",
    "kv": rf"(?P<key>[A-Z][a-z]+): (?P<value>{NUMBER})\.",
    "passkey": r"The pass key is (?P<value>\d+)\. Remember it\. (?P=value) is the pass key\.",
}
ASKED = {
    "magic": "What is the special magic number for {} mentioned in the text?",
    "kv": "What is the value of {}?",
    "passkey": "What is the pass key?",
}


def words(text: str) -> int:
    return len(text.split())


def small_talk(random: Random) -> Iterator[str]:
    return sentences_of_small_talk(load_grammar(), random)


def made(seed: int, kind: str, tokens: int = 600, needles: int = 5) -> Conversation:
    return needles_conversation(seed, tokens, words, small_talk, kind, needles)


def answers_in(conversation: Conversation, kind: str) -> dict[str, list[str]]:
    """All questions that the text answers, with every answer."""
    found: dict[str, list[str]] = {}
    for line in re.finditer(LINES[kind], conversation.messages[0].content):
        question = ASKED[kind].format(line.groupdict().get("key"))
        found.setdefault(question, []).append(line["value"])
    return found


def value_of(variable: str, text: str) -> str:
    """Value of a chain's last variable, followed to its first."""
    (found,) = re.findall(rf"VAR {variable} = (VAR \w+|\d+)\.", text)
    return value_of(found.removeprefix("VAR "), text) if found.startswith("VAR") else found


@pytest.mark.parametrize("kind", LINES)
def test_text_has_one_answer_per_question(kind: str) -> None:
    conversation = made(3, kind)
    expected = {q.question: [q.answer] for q in conversation.questions}
    assert answers_in(conversation, kind) == expected
    assert len(expected) == (1 if kind == "passkey" else 5)
    assert {q.kind for q in conversation.questions} == {f"niah_{kind}"}


@pytest.mark.parametrize("seed", range(3))
def test_variable_chains_lead_to_their_answers_in_order(seed: int) -> None:
    conversation = made(seed, "vars")
    text = conversation.messages[0].content
    for question in conversation.questions:
        (variable,) = re.findall(r"value of the variable (\w+)\?", question.question)
        assert value_of(variable, text) == question.answer
        assert f"= {question.answer}." in text[: text.index(f"VAR {variable} = ")] + text
    for new, old in re.findall(r"VAR (\w+) = VAR (\w+)\.", text):
        assert text.index(f"VAR {old} = ") < text.index(f"VAR {new} = ")


def test_haystack_text_keeps_its_order() -> None:
    numbered = (f"Straw {n} lies here." for n in count())
    conversation = needles_conversation(0, 300, words, lambda _: numbered, "kv", 4)
    text = conversation.messages[0].content
    straws = [int(n) for n in re.findall(r"Straw (\d+) lies here\.", text)]
    assert straws == list(range(len(straws)))
    assert len(straws) > 30
    indices = [text.index(f": {q.answer}.") for q in conversation.questions]
    assert min(indices) < len(text) / 2 < max(indices)


@pytest.mark.parametrize("tokens", [150, 600, 2000])
@pytest.mark.parametrize("kind", KINDS)
def test_token_limit_is_nearly_reached(tokens: int, kind: str) -> None:
    assert 0.7 * tokens < count_message_tokens(made(1, kind, tokens).messages, words) <= tokens


def test_wording_equals_the_training_data(shared_data: Path) -> None:
    """The lab's files, read in the same way, give the answers that they expect."""
    seen: set[str] = set()
    for path in sorted((shared_data / "dialogues").glob("needles-1500-*.json")):
        conversation = read_conversation(path)
        kind = conversation.questions[0].kind.removeprefix("niah_")
        seen.add(kind)
        theirs = answers_in(conversation, kind)
        for question in conversation.questions:
            assert ", ".join(theirs[question.question]) == question.answer
        ours = made(0, kind)
        assert conversation.messages[1] == ours.messages[1]
    assert seen == {"magic", "kv"}


def test_equal_seeds_give_equal_texts() -> None:
    assert made(7, "kv") == made(7, "kv")
    assert made(7, "kv").messages != made(8, "kv").messages


@pytest.mark.parametrize(
    ("tokens", "needles", "message"), [(60, 8, "must hold 8 needles"), (600, 0, "1 or more, got 0")]
)
def test_parameters_out_of_range_are_refused(tokens: int, needles: int, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        made(0, "magic", tokens, needles)


def test_unknown_kind_lists_the_known() -> None:
    with pytest.raises(UnknownName, match="'pin': there are magic, kv, passkey, vars"):
        made(0, "pin")
