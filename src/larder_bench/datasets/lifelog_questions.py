"""Questions about a life-log, each with the one answer that the conversation gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

from larder.core.conversation import Conversation, Question
from larder.core.errors import BadParameter, TooLittle, UnknownName
from larder_bench.datasets.lifelog_sessions import (
    FACTS_PER_SESSION,
    FactSubject,
    LifeLog,
    LifeLogFact,
    write_lifelog,
)

# How often each fact may be tried before there is nothing left to ask.
ROUNDS = 20


def lifelog_conversation(
    seed: int,
    tokens: int,
    count_tokens: Callable[[str], int],
    questions: int,
    kinds: Sequence[str] = ("single", "session", "twohop", "list"),
    facts: tuple[int, int] = FACTS_PER_SESSION,
) -> Conversation:
    """A life-log of at most `tokens` tokens with `questions` questions; equal seeds, equal logs.

    Questions ask for facts of all sessions by turns. Their kinds come as often as in the training
    of the seed model: `single` asks for a fact as it stands last, `session` in which session
    something first came up, `twohop` for one attribute of what another attribute identifies, `list`
    for all that was told of something, and `update`, if it is named, for facts that have changed.

    Args:
        seed: of everything random.
        tokens: the most that the messages may take, marks between them included.
        count_tokens: how many tokens a text is.
        questions: how many to ask, all different.
        kinds: those that may be asked.
        facts: the fewest and the most that a session tells.

    Raises:
        TooLittle: `tokens` is too small for a session, or the log does not hold enough to ask.
        BadParameter: `tokens` is more than there is to tell.
        UnknownName: a kind that does not exist.
    """
    if not kinds:
        raise BadParameter(f"lifelog.kinds must name one or more of {', '.join(KINDS)}, got none.")
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownName(f"no kind of question {kind!r}: there are {', '.join(KINDS)}.")
    log = write_lifelog(seed, tokens, count_tokens, facts)
    return Conversation(
        name=f"lifelog-{tokens}-{seed}",
        messages=tuple(log.messages),
        questions=draw_questions(log, questions, kinds),
    )


def draw_questions(
    log: LifeLog, count: int, kinds: Sequence[str] = ("single", "session", "twohop", "list")
) -> tuple[Question, ...]:
    """Different questions of the kinds named, their answers read off the log.

    Raises:
        TooLittle: the log does not hold enough to ask.
    """
    found: dict[str, Question] = {}
    weights = [KINDS[kind][0] for kind in kinds]
    for fact in _round_robin(log):
        if len(found) >= count:
            break
        (kind,) = log.random.choices(kinds, weights)
        question = KINDS[kind][1](fact, log)
        if question:
            found.setdefault(question.question, question)
    if len(found) < count:
        raise TooLittle(
            f"lifelog.questions is {count}, but the log holds only {len(found)} of the kinds "
            f"{', '.join(kinds)}: ask fewer, or write more tokens."
        )
    return tuple(found.values())


def _round_robin(log: LifeLog) -> Iterator[LifeLogFact]:
    """The facts as they stand, one of each session, then the next of each, several times over."""
    sessions: dict[int, list[LifeLogFact]] = {}
    for fact in log.latest.values():
        sessions.setdefault(fact.session, []).append(fact)
    for _ in range(ROUNDS):
        rows = [_shuffled(facts, log.random) for facts in sessions.values()]
        for turn in range(max(map(len, rows))):
            yield from _shuffled([row[turn] for row in rows if turn < len(row)], log.random)


def _shuffled(facts: Sequence[LifeLogFact], random: Random) -> list[LifeLogFact]:
    return random.sample(facts, len(facts))


def _single(fact: LifeLogFact, log: LifeLog) -> Question:
    asked = log.random.choice(fact.subject.attribute.questions)
    asked = asked.replace("{E}", fact.subject.entity)
    return Question(asked, fact.value, "single", log.depth(fact.place), sources=1)


def _update(fact: LifeLogFact, log: LifeLog) -> Question | None:
    """None where the value has never changed."""
    if log.first[fact.subject].value == fact.value:
        return None
    return replace(_single(fact, log), kind="update")


def _session(fact: LifeLogFact, log: LifeLog) -> Question:
    entity = fact.subject.entity
    told = [log.first[subject] for subject in _subjects_of_entity(fact.subject, log)]
    first = min(told, key=lambda fact: fact.place)
    asked, depth = f"In which session did I first talk about {entity}?", log.depth(first.place)
    return Question(asked, f"session {first.session}", "session", depth, sources=1)


def _two_hop(fact: LifeLogFact, log: LifeLog) -> Question | None:
    """None where the entity has no second attribute or the value does not identify it."""
    name = fact.subject.attribute.name
    others = [
        subject for subject in _subjects_of_entity(fact.subject, log) if subject != fact.subject
    ]
    alike = [
        other
        for other in log.latest.values()
        if (other.subject.attribute.name, other.value) == (name, fact.value)
    ]
    if not others or len(alike) > 1:
        return None
    wanted = log.latest[log.random.choice(others)]
    asked = f"What is the {wanted.subject.attribute.name} of the one whose {name} is {fact.value}?"
    return Question(asked, wanted.value, "twohop", sources=len({fact.place, wanted.place}))


def _list(fact: LifeLogFact, log: LifeLog) -> Question:
    subjects = _subjects_of_entity(fact.subject, log)
    told = [f"{subject.attribute.name}: {log.latest[subject].value}" for subject in subjects]
    asked = f"List everything I told you about {fact.subject.entity}."
    places = {log.latest[subject].place for subject in subjects}
    return Question(asked, "; ".join(told), "list", sources=len(places))


def _subjects_of_entity(subject: FactSubject, log: LifeLog) -> list[FactSubject]:
    """The subjects told of the same entity, in the order they first came up."""
    same = (subject.topic, subject.entity)
    return [other for other in log.first if (other.topic, other.entity) == same]


KINDS: Mapping[str, tuple[float, Callable[[LifeLogFact, LifeLog], Question | None]]] = {
    "single": (0.72, _single),
    "session": (0.10, _session),
    "twohop": (0.10, _two_hop),
    "list": (0.08, _list),
    "update": (0.10, _update),
}
