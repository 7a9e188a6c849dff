"""Life-logs: a user tells an assistant about their life, session by session, then asks questions.

The wording and the layout are the ones that the bundled seed model was trained on: a system message
starts each session, the user states facts among small talk, the assistant acknowledges, and
sometimes an old fact changes. Questions ask only for facts of the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from larder.core import BadParameter, Message, TooLittle
from larder_bench.datasets.grammar import Attribute, Grammar, Topic, draw_value, load_grammar

# Each message has a role marker before it and an end marker after it.
MESSAGE_MARKER_TOKENS = 2
TOPICS_PER_SESSION = (1, 1, 2, 2, 3)
FACTS_PER_SESSION = (3, 9)
CHAT_PER_FACT = (0, 1, 1, 2)
UPDATE_CHANCE = 0.25
CHAT_CHANCE = 0.3


@dataclass(frozen=True)
class FactSubject:
    """Subject of a fact: one attribute of one entity."""

    topic: Topic
    entity: str
    attribute: Attribute


@dataclass(frozen=True)
class LifeLogFact:
    """Value of a subject, stated in a session, counted from 1, by a message, counted from 0."""

    subject: FactSubject
    value: str
    session: int
    message_index: int


@dataclass(frozen=True)
class LifeLogSession:
    """Messages of a session and the facts in them."""

    messages: tuple[Message, ...]
    facts: tuple[LifeLogFact, ...]


@dataclass
class LifeLog:
    """Sessions so far; `first` and `latest` hold the first and the latest fact of each subject.

    Args:
        facts: minimum and maximum number of facts per session.
    """

    grammar: Grammar
    random: Random
    messages: list[Message] = field(default_factory=list)
    first: dict[FactSubject, LifeLogFact] = field(default_factory=dict)
    latest: dict[FactSubject, LifeLogFact] = field(default_factory=dict)
    remaining_subjects: list[FactSubject] = field(default_factory=list)
    sessions: int = 0
    facts: tuple[int, int] = FACTS_PER_SESSION

    def __post_init__(self) -> None:
        self.remaining_subjects = [
            FactSubject(topic, entity, attribute)
            for topic in self.grammar.topics
            for entity in topic.entities
            for attribute in topic.attributes
        ]
        self.random.shuffle(self.remaining_subjects)

    def next_session(self) -> LifeLogSession | None:
        """Candidate for the next session; None if all facts have been stated. `keep` adds it."""
        topics = [
            t for t in self.grammar.topics if any(s.topic == t for s in self.remaining_subjects)
        ]
        if not topics:
            return None
        random = self.random
        topics = random.sample(topics, min(len(topics), random.choice(TOPICS_PER_SESSION)))
        each = max(1, random.randint(*self.facts) // len(topics))
        subjects = [subject for topic in topics for subject in self._subjects(topic, each)]
        messages, facts = [self.header()], []
        for subject in subjects:
            value = draw_value(subject.attribute.value_kind, self.grammar.words, random)
            message_index = len(self.messages) + len(messages)
            facts.append(LifeLogFact(subject, value, self.sessions + 1, message_index))
            messages += self._fact_messages(facts[-1])
            if random.random() < CHAT_CHANCE:
                messages += self._answered(random.choice(subject.topic.chat))
        return LifeLogSession(tuple(messages), tuple(facts))

    def keep(self, session: LifeLogSession) -> None:
        """Add a session and record its facts."""
        self.sessions += 1
        self.messages += session.messages
        for fact in session.facts:
            self.first.setdefault(fact.subject, fact)
            self.latest[fact.subject] = fact
        self.remaining_subjects = [
            subject for subject in self.remaining_subjects if subject not in self.first
        ]

    def depth(self, index: int) -> float:
        """Relative position of a message's start: the share of all characters before it."""
        return relative_depth(self.messages, index)

    def header(self) -> Message:
        """System message that starts the next session, with a random date."""
        words, random = self.grammar.words, self.random
        day = f"{random.choice(words['month'])} {random.randint(1, 28)}"
        weekday = random.choice(words["weekday"])
        return Message("system", f"Session {self.sessions + 1}, {weekday} {day}")

    def _subjects(self, topic: Topic, count: int) -> list[FactSubject]:
        """New subjects of a topic, and sometimes an old one whose value changes."""
        subjects = [subject for subject in self.remaining_subjects if subject.topic == topic][
            :count
        ]
        known = [subject for subject in self.latest if subject.topic == topic]
        if known and self.random.random() < UPDATE_CHANCE:
            subjects.append(self.random.choice(known))
        return subjects

    def _fact_messages(self, fact: LifeLogFact) -> list[Message]:
        subject, random = fact.subject, self.random
        leads = self.grammar.updates if subject in self.latest else self.grammar.openers
        lead = random.choice(leads)
        template = random.choice(subject.attribute.statements)
        statement = template.replace("{E}", subject.entity).replace("{V}", fact.value)
        sentences = [f"{lead} {statement}." if lead else f"{statement[0].upper()}{statement[1:]}."]
        for _ in range(random.choice(CHAT_PER_FACT)):
            index = random.randint(0, len(sentences))
            sentences.insert(index, random.choice(subject.topic.chat))
        return self._answered(" ".join(sentences))

    def _answered(self, text: str) -> list[Message]:
        answer = self.random.choice(self.grammar.acknowledgements)
        return [Message("user", text), Message("assistant", answer)]


def write_lifelog(
    seed: int,
    tokens: int,
    count_tokens: Callable[[str], int],
    facts: tuple[int, int] = FACTS_PER_SESSION,
) -> LifeLog:
    """Life-log of as many whole sessions as fit into `tokens`.

    Raises:
        TooLittle: no session fits.
        BadParameter: all facts of the grammar do not fill `tokens`.
    """
    log = LifeLog(load_grammar(), Random(seed), facts=facts)
    left = tokens
    while session := log.next_session():
        left -= count_message_tokens(session.messages, count_tokens)
        if left < 0:
            break
        log.keep(session)
    if not log.sessions:
        raise TooLittle(f"lifelog.tokens must hold a session, got {tokens}: take 400 or more.")
    if left > 0 and not log.remaining_subjects:
        raise BadParameter(
            f"lifelog.tokens is {tokens}, but all facts together take {tokens - left}: take less."
        )
    return log


def relative_depth(messages: Sequence[Message], index: int, start: int = 0) -> float:
    """Relative position of a message, or of a character in it: the share of all characters before
    it.
    """
    lengths = [len(message.content) for message in messages]
    return (sum(lengths[:index]) + start) / sum(lengths)


def count_message_tokens(messages: Sequence[Message], count_tokens: Callable[[str], int]) -> int:
    """Number of tokens of messages, including the markers around each."""
    return sum(count_tokens(message.content) + MESSAGE_MARKER_TOKENS for message in messages)
