"""Questions about a life-log, each with exactly one answer in the conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

from larder.core import BadParameter, Conversation, Question, TooLittle, UnknownName
from larder_bench.datasets.lifelog_sessions import (
    FACTS_PER_SESSION,
    FactSubject,
    LifeLog,
    LifeLogFact,
    write_lifelog,
)

# Rounds over all facts before the search for questions ends.
ROUNDS = 20


def lifelog_conversation(
    seed: int,
    tokens: int,
    count_tokens: Callable[[str], int],
    questions: int,
    kinds: Sequence[str] = ("single", "session", "twohop", "list"),
    facts: tuple[int, int] = FACTS_PER_SESSION,
) -> Conversation:
    """Life-log of at most `tokens` tokens with `questions` questions; equal seeds give equal logs.

    Questions ask for facts of all sessions in turn. The frequencies of their kinds are those of the
    seed model's training: `single` asks for the latest value of a fact, `session` for the session
    in which something first came up, `twohop` for one attribute of something that another attribute
    identifies, `list` for all facts about something, and `update`, if selected, for facts that have
    changed.

    Args:
        seed: seed of all random choices.
        tokens: maximum number of tokens of the messages, markers between them included.
        count_tokens: returns the number of tokens of a text.
        questions: number of questions, all different.
        kinds: allowed kinds of questions.
        facts: minimum and maximum number of facts per session.

    Raises:
        TooLittle: `tokens` is too small for a session, or the log yields too few questions.
        BadParameter: `tokens` is more than all facts of the grammar fill.
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
    """Different questions of the given kinds, their answers taken from the log.

    Raises:
        TooLittle: the log yields too few questions.
    """
    questions: dict[str, Question] = {}
    weights = [KINDS[kind][0] for kind in kinds]
    for fact in _round_robin(log):
        if len(questions) >= count:
            break
        (kind,) = log.random.choices(kinds, weights)
        question = KINDS[kind][1](fact, log)
        if question:
            questions.setdefault(question.question, question)
    if len(questions) < count:
        raise TooLittle(
            f"lifelog.questions is {count}, but the log holds only {len(questions)} of the kinds "
            f"{', '.join(kinds)}: ask fewer, or take more tokens."
        )
    return tuple(questions.values())


def _round_robin(log: LifeLog) -> Iterator[LifeLogFact]:
    """Latest facts, one of each session, then the next of each, over several rounds."""
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
    template = log.random.choice(fact.subject.attribute.questions)
    question = template.replace("{E}", fact.subject.entity)
    return Question(question, fact.value, "single", log.depth(fact.message_index), sources=1)


def _update(fact: LifeLogFact, log: LifeLog) -> Question | None:
    """Question for a changed value; None if the value has never changed."""
    if log.first[fact.subject].value == fact.value:
        return None
    return replace(_single(fact, log), kind="update")


def _session(fact: LifeLogFact, log: LifeLog) -> Question:
    entity = fact.subject.entity
    facts = [log.first[subject] for subject in _subjects_of_entity(fact.subject, log)]
    first = min(facts, key=lambda fact: fact.message_index)
    question, depth = (
        f"In which session did I first talk about {entity}?",
        log.depth(first.message_index),
    )
    return Question(question, f"session {first.session}", "session", depth, sources=1)


def _two_hop(fact: LifeLogFact, log: LifeLog) -> Question | None:
    """Question for another attribute of an entity; None if it has no second attribute or the value
    does not identify it.
    """
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
    target = log.latest[log.random.choice(others)]
    question = (
        f"What is the {target.subject.attribute.name} of the one whose {name} is {fact.value}?"
    )
    return Question(
        question, target.value, "twohop", sources=len({fact.message_index, target.message_index})
    )


def _list(fact: LifeLogFact, log: LifeLog) -> Question:
    subjects = _subjects_of_entity(fact.subject, log)
    values = [f"{subject.attribute.name}: {log.latest[subject].value}" for subject in subjects]
    question = f"List everything I told you about {fact.subject.entity}."
    sessions = {log.latest[subject].message_index for subject in subjects}
    return Question(question, "; ".join(values), "list", sources=len(sessions))


def _subjects_of_entity(subject: FactSubject, log: LifeLog) -> list[FactSubject]:
    """Subjects with facts about the same entity, in order of first appearance."""
    same = (subject.topic, subject.entity)
    return [other for other in log.first if (other.topic, other.entity) == same]


KINDS: Mapping[str, tuple[float, Callable[[LifeLogFact, LifeLog], Question | None]]] = {
    "single": (0.72, _single),
    "session": (0.10, _session),
    "twohop": (0.10, _two_hop),
    "list": (0.08, _list),
    "update": (0.10, _update),
}
