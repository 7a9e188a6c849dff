"""Life-logs have the seed model's wording, and contain the answer of every question."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.lifelog_reader import GRAMMAR, HEADER, SINGLES, facts_of, sentences_of, statement_in
from larder import Conversation, Question, read_conversation
from larder.core import BadParameter, UnknownName
from larder_bench.datasets.grammar import VALUES, draw_value
from larder_bench.datasets.lifelog_questions import lifelog_conversation
from larder_bench.datasets.lifelog_sessions import LifeLog, count_message_tokens, write_lifelog
from larder_bench.demo_conversation import BUNDLED, conversation_json, demo_conversation


def words(text: str) -> int:
    return len(text.split())


def log_of(seed: int, tokens: int = 3000, questions: int = 40) -> Conversation:
    return lifelog_conversation(seed, tokens, words, questions)


def session_of(single: Question, conversation: Conversation) -> int:
    return facts_of(conversation.messages)[SINGLES[single.question]][-1][0]


def answer_of(question: Question, conversation: Conversation) -> str:
    """Answer, found by going through all facts of the text."""
    facts = facts_of(conversation.messages)
    if question.kind == "single":
        return facts[SINGLES[question.question]][-1][1]
    if question.kind == "session":
        entity = question.question.removeprefix("In which session did I first talk about ")[:-1]
        sessions = [
            s for key, statements in facts.items() if key[0] == entity for s, _ in statements
        ]
        return f"session {min(sessions)}"
    if question.kind == "twohop":
        form = r"What is the (.+) of the one whose (.+?) is (.+)\?"
        wanted, known, value = re.fullmatch(form, question.question).groups()  # type: ignore[union-attr]
        (entity,) = [
            key[0]
            for key, statements in facts.items()
            if (key[1], statements[-1][1]) == (known, value.lower())
        ]
        return facts[entity, wanted][-1][1]
    entity = question.question.removeprefix("List everything I told you about ")[:-1]
    lines = [
        f"{key[1]}: {statements[-1][1]}" for key, statements in facts.items() if key[0] == entity
    ]
    return "; ".join(lines)


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_is_in_the_text(seed: int) -> None:
    conversation = log_of(seed)
    for question in conversation.questions:
        assert question.answer.lower() == answer_of(question, conversation), question
    assert set(Counter(q.kind for q in conversation.questions)) == {
        "single",
        "session",
        "twohop",
        "list",
    }
    assert len({q.question for q in conversation.questions}) == len(conversation.questions) == 40


def test_facts_change_over_time() -> None:
    changed = [
        statements for statements in facts_of(log_of(0).messages).values() if len(statements) > 1
    ]
    assert changed
    assert all(statements[0][0] < statements[-1][0] for statements in changed)


def test_questions_of_different_facts_are_distinct() -> None:
    asked = Counter(
        question.replace("{E}", entity)
        for topic in GRAMMAR.topics
        for entity in topic.entities
        for attribute in topic.attributes
        for question in attribute.questions
    )
    assert max(asked.values()) == 1


def test_layout_is_a_header_then_turns() -> None:
    messages = log_of(3).messages
    assert HEADER.fullmatch(messages[0].content)
    headers = [HEADER.fullmatch(m.content) for m in messages if m.role == "system"]
    assert [int(header[1]) for header in headers if header] == list(range(1, len(headers) + 1))
    roles = "".join(m.role[0] for m in messages)
    assert re.fullmatch(r"(s(ua)+)+", roles)


@pytest.mark.slow
def test_wording_equals_the_training_data(shared_data: Path) -> None:
    """Facts reduced to their templates, there is hardly a sentence that the lab's files lack."""
    theirs: Counter[str] = Counter()
    for path in sorted((shared_data / "dialogues").glob("lifelog-*.json")):
        theirs += shapes(read_conversation(path))
    ours = shapes(log_of(1))
    unknown = {shape: count for shape, count in ours.items() if shape not in theirs}
    assert sum(unknown.values()) < 0.02 * ours.total(), unknown


def shapes(conversation: Conversation) -> Counter[str]:
    found: Counter[str] = Counter()
    for message in conversation.messages:
        for sentence in sentences_of(HEADER.sub("HEADER", message.content)):
            if statements := statement_in(sentence):
                found.update([statements[1], f"lead: {statements[2]['lead']}"])
            else:
                found.update([f"{message.role}: {sentence}"])
    return found


def test_equal_seeds_give_equal_logs() -> None:
    assert log_of(7) == log_of(7)
    assert log_of(7).messages != log_of(8).messages


@pytest.mark.parametrize("tokens", [300, 1000, 3000])
def test_token_limit_is_nearly_reached(tokens: int) -> None:
    taken = count_message_tokens(log_of(0, tokens, 3).messages, words)
    assert tokens - 300 < taken <= tokens


def test_every_session_with_current_facts_is_asked_about() -> None:
    log = write_lifelog(0, 3000, words)
    conversation = lifelog_conversation(0, 3000, words, log.sessions, kinds=("single",))
    asked = Counter(session_of(question, conversation) for question in conversation.questions)
    standing = {statements[-1][0] for statements in facts_of(conversation.messages).values()}
    assert set(asked) == standing
    # Sessions whose facts were all changed later have none to ask for; others make up for them.
    assert max(asked.values()) <= 1 + log.sessions - len(standing)


def test_discarded_session_leaves_no_state() -> None:
    log = LifeLog(GRAMMAR, Random(0))
    assert log.next_session() is not None
    assert (log.messages, log.latest, log.first, log.sessions) == ([], {}, {}, 0)


def test_values_have_the_form_of_their_kind() -> None:
    random = Random(0)
    kinds = {attribute.value_kind for topic in GRAMMAR.topics for attribute in topic.attributes}
    assert kinds <= set(VALUES)
    forms = {"code": r"[A-Z]{2}\d{3}", "phone": r"\d{3}-\d{3}-\d{4}", "money": r"\d+ dollars"}
    forms |= {"person": r"\w+ \w+", "color_thing": r"the [\w ]+", "score": r"\d to \d"}
    for kind in VALUES:
        assert re.fullmatch(forms.get(kind, r".+"), draw_value(kind, GRAMMAR.words, random))


@pytest.mark.parametrize(
    ("tokens", "questions", "kinds", "message"),
    [
        (10, 1, ("single",), "lifelog.tokens must hold a session, got 10"),
        (10**6, 1, ("single",), "all facts together take"),
        (400, 10**4, ("single",), "the log holds only"),
        (400, 1, (), "lifelog.kinds must name one or more of single"),
    ],
)
def test_parameters_out_of_range_are_refused(
    tokens: int, questions: int, kinds: tuple[str, ...], message: str
) -> None:
    with pytest.raises(BadParameter, match=message):
        lifelog_conversation(0, tokens, words, questions, kinds)


def test_unknown_kind_lists_the_known() -> None:
    with pytest.raises(UnknownName, match="'riddle': there are single, session, twohop, list"):
        lifelog_conversation(0, 1000, words, 1, ("riddle",))


class TestDemo:
    def test_bundled_file_equals_the_generator(self) -> None:
        assert BUNDLED.read_text(encoding="utf-8") == conversation_json(demo_conversation())

    def test_bundled_file_is_loaded(self) -> None:
        made, read = demo_conversation(), read_conversation(BUNDLED)
        asked = tuple(replace(question, depth=None, sources=None) for question in made.questions)
        assert (read.messages, read.questions) == (made.messages, asked)
        assert {q.kind for q in read.questions} == {"single"}
        assert len(read.questions) == 24

    @pytest.mark.slow
    def test_bundled_file_is_written_from_the_command_line(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "conversation.json"
        command = [sys.executable, "-m", "larder_bench.demo_conversation", str(path)]
        subprocess.run(command, check=True)
        assert json.loads(path.read_text()) == json.loads(BUNDLED.read_text())
