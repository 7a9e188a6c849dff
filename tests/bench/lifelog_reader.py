"""Reader of the facts of a life-log from its text, using only the templates."""

from __future__ import annotations

import re
from functools import cache

from larder import Message
from larder_bench.datasets.grammar import load_grammar

GRAMMAR = load_grammar()
HEADER = re.compile(r"Session (\d+), [A-Z][a-z]+day [A-Z][a-z]+ \d+")


def pattern_of(statement: str, entity: str) -> re.Pattern[str]:
    before, after = (re.escape(p.replace("{E}", entity)) for p in statement.split("{V}"))
    start = f"(?i:{before[0]}){before[1:]}" if before else ""
    return re.compile(f"(?P<lead>.*, |.*: |){start}(?P<value>[^.]+){after}")


@cache
def statement_patterns() -> list[tuple[tuple[str, str], str, re.Pattern[str]]]:
    """Fact, wording and pattern of every statement of the grammar."""
    return [
        ((entity, attribute.name), statement, pattern_of(statement, entity))
        for topic in GRAMMAR.topics
        for entity in topic.entities
        for attribute in topic.attributes
        for statement in attribute.statements
    ]


def statement_in(sentence: str) -> tuple[tuple[str, str], str, re.Match[str]] | None:
    """Statement that a sentence is an instance of, if any.

    Of "E is V" and "E is kept at V" the longer one is meant where both fit.
    """
    leads = {*GRAMMAR.openers, *GRAMMAR.updates}
    matches = (
        (fact, statement, pattern.fullmatch(sentence))
        for fact, statement, pattern in statement_patterns()
    )
    found = [(f, statement, m) for f, statement, m in matches if m and m["lead"].strip() in leads]
    return min(found, key=lambda one: len(one[2]["value"]), default=None)


def sentences_of(text: str) -> list[str]:
    return [part.rstrip(".") for part in re.split(r"(?<=[.!?]) ", text)]


@cache
def facts_of(messages: tuple[Message, ...]) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """Facts of a text: session and value by entity and attribute, in order.

    Values are in lower case, for one that starts its sentence has lost its own.
    """
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    session = 0
    for message in messages:
        if header := HEADER.fullmatch(message.content):
            session = int(header[1])
        for sentence in sentences_of(message.content):
            if statement := statement_in(sentence):
                found.setdefault(statement[0], []).append((session, statement[2]["value"].lower()))
    return found


SINGLES = {
    asked.replace("{E}", entity): (entity, attribute.name)
    for topic in GRAMMAR.topics
    for entity in topic.entities
    for attribute in topic.attributes
    for asked in attribute.questions
}
