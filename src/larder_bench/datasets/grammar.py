"""Grammar of life-logs: topics with entities and attributes, and words to fill them with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from random import Random
from string import ascii_uppercase
from typing import Any

Words = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Attribute:
    """Attribute of an entity: templates with {E} for the entity and {V} for the value."""

    name: str
    value_kind: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]

    def __hash__(self) -> int:
        # Facts are looked up by their subject very often, so the hash must be cheap.
        return hash(self.name)


@dataclass(frozen=True)
class Topic:
    """Topic of life: entities that share attributes, and small talk without facts."""

    name: str
    entities: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    chat: tuple[str, ...]

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Grammar:
    """Topics, phrases that introduce, correct and acknowledge facts, and the words of values."""

    topics: tuple[Topic, ...]
    openers: tuple[str, ...]
    updates: tuple[str, ...]
    acknowledgements: tuple[str, ...]
    words: Words


@cache
def load_grammar() -> Grammar:
    """Grammar of the package, from `topics.json` next to this file."""
    data = json.loads(
        resources.files("larder_bench.datasets").joinpath("topics.json").read_text("utf-8")
    )
    return Grammar(
        topics=tuple(_topic(name, fields) for name, fields in data["topics"].items()),
        openers=tuple(data["openers"]),
        updates=tuple(data["updates"]),
        acknowledgements=tuple(data["acks"]),
        words={kind: tuple(words) for kind, words in data["values"].items()},
    )


def draw_value(kind: str, words: Words, random: Random) -> str:
    """Random value of a kind that attributes use, such as `person` or `money`."""
    return VALUES[kind](words, random)


def _topic(name: str, fields: Mapping[str, Any]) -> Topic:
    return Topic(
        name=name,
        entities=tuple(fields["entities"]),
        attributes=tuple(
            Attribute(attribute, kind, tuple(statements), tuple(questions))
            for attribute, (kind, statements, questions) in fields["attributes"].items()
        ),
        chat=tuple(fields["chat"]),
    )


Draw = Callable[[Words, Random], str]


def _word(kind: str) -> Draw:
    return lambda words, random: random.choice(words[kind])


def _counted(low: int, high: int, unit: str) -> Draw:
    return lambda _, random: f"{random.randint(low, high)} {unit}"


def _invented(lengths: tuple[int, ...]) -> Draw:
    """Invented name with one of these numbers of syllables, unknown to any model, so it can only be
    looked up.
    """

    def draw(words: Words, random: Random) -> str:
        syllables = range(random.choice(lengths))
        return "".join(random.choice(words["syllables"]) for _ in syllables).capitalize()

    return draw


def _code(_: Words, random: Random) -> str:
    letters = random.choice(ascii_uppercase) + random.choice(ascii_uppercase)
    return f"{letters}{random.randint(100, 999)}"


def _phone(_: Words, random: Random) -> str:
    parts = (random.randint(200, 999), random.randint(100, 999), random.randint(1000, 9999))
    return "-".join(map(str, parts))


VALUES: Mapping[str, Draw] = {
    **{kind: _word(kind) for kind in ("city", "food", "drink", "color", "job", "weekday")},
    "name": _invented((2, 2, 3)),
    "brand": _invented((2, 3, 3)),
    "person": lambda words, random: (
        f"{_word('first')(words, random)} {_word('last')(words, random)}"
    ),
    "color_thing": lambda words, random: (
        f"the {_word('color')(words, random)} {_word('thing')(words, random)}"
    ),
    "title": lambda words, random: (
        f"{_word('adjective')(words, random)} {_word('noun')(words, random)}"
    ),
    "date": lambda words, random: f"{_word('month')(words, random)} {random.randint(1, 28)}",
    "money": _counted(11, 989, "dollars"),
    "minutes": _counted(6, 95, "minutes"),
    "kilos": _counted(2, 99, "kilos"),
    "meters": _counted(2, 99, "meters"),
    "number": lambda _, random: str(random.randint(12, 9999)),
    "code": _code,
    "phone": _phone,
    "score": lambda _, random: f"{random.randint(0, 9)} to {random.randint(0, 9)}",
}
