"""Life-logs: a person tells an assistant about their life, session by session, then asks.

The wording and the layout are those that the bundled seed model was trained on: a system message
heads each session, the user tells facts among small talk, the assistant acknowledges, and now and
then an old fact changes. Only facts that stand in the conversation are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from larder.core.conversation import Message
from larder.core.errors import BadParameter, TooLittle
from larder_bench.datasets.grammar import Attribute, Grammar, Topic, draw_value, load_grammar

# Each message stands between a mark of its role and one of its end.
MESSAGE_MARKER_TOKENS = 2
TOPICS_PER_SESSION = (1, 1, 2, 2, 3)
FACTS_PER_SESSION = (3, 9)
CHAT_PER_FACT = (0, 1, 1, 2)
UPDATE_CHANCE = 0.25
CHAT_CHANCE = 0.3


@dataclass(frozen=True)
class FactSubject:
    """What a fact is about: one attribute of one entity."""

    topic: Topic
    entity: str
    attribute: Attribute


@dataclass(frozen=True)
class LifeLogFact:
    """A value told of a subject in a session, counted from 1, by a message, counted from 0."""

    subject: FactSubject
    value: str
    session: int
    place: int


@dataclass(frozen=True)
class LifeLogSession:
    """The messages of one sitting and the facts told in it."""

    messages: tuple[Message, ...]
    facts: tuple[LifeLogFact, ...]


@dataclass
class LifeLog:
    """The sessions so far; `first` and `latest` hold each subject as it was told first and last.

    Args:
        facts: the fewest and the most of a session.
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
        """A session that could come next, or None if everything is told. `keep` makes it so."""
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
            place = len(self.messages) + len(messages)
            facts.append(LifeLogFact(subject, value, self.sessions + 1, place))
            messages += self._told(facts[-1])
            if random.random() < CHAT_CHANCE:
                messages += self._answered(random.choice(subject.topic.chat))
        return LifeLogSession(tuple(messages), tuple(facts))

    def keep(self, session: LifeLogSession) -> None:
        """Add a session and remember what was told in it."""
        self.sessions += 1
        self.messages += session.messages
        for fact in session.facts:
            self.first.setdefault(fact.subject, fact)
            self.latest[fact.subject] = fact
        self.remaining_subjects = [
            subject for subject in self.remaining_subjects if subject not in self.first
        ]

    def depth(self, place: int) -> float:
        """Where a message starts: the share of all letters that stand before it."""
        return relative_depth(self.messages, place)

    def header(self) -> Message:
        """What heads the next session, on a day of its own."""
        words, random = self.grammar.words, self.random
        day = f"{random.choice(words['month'])} {random.randint(1, 28)}"
        weekday = random.choice(words["weekday"])
        return Message("system", f"Session {self.sessions + 1}, {weekday} {day}")

    def _subjects(self, topic: Topic, count: int) -> list[FactSubject]:
        """New subjects of a topic, and sometimes an old one whose value changes."""
        subjects = [subject for subject in self.remaining_subjects if subject.topic == topic][
            :count
        ]
        told = [subject for subject in self.latest if subject.topic == topic]
        if told and self.random.random() < UPDATE_CHANCE:
            subjects.append(self.random.choice(told))
        return subjects

    def _told(self, fact: LifeLogFact) -> list[Message]:
        subject, random = fact.subject, self.random
        leads = self.grammar.updates if subject in self.latest else self.grammar.openers
        lead = random.choice(leads)
        said = random.choice(subject.attribute.statements)
        said = said.replace("{E}", subject.entity).replace("{V}", fact.value)
        sentences = [f"{lead} {said}." if lead else f"{said[0].upper()}{said[1:]}."]
        for _ in range(random.choice(CHAT_PER_FACT)):
            place = random.randint(0, len(sentences))
            sentences.insert(place, random.choice(subject.topic.chat))
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
    """Sessions one after the other, as many whole ones as fit into `tokens`.

    Raises:
        TooLittle: not one session fits.
        BadParameter: all there is to tell does not fill `tokens`.
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
            f"lifelog.tokens is {tokens}, but all there is to tell is {tokens - left}: take less."
        )
    return log


def relative_depth(messages: Sequence[Message], place: int, start: int = 0) -> float:
    """Where a message, or a letter of it, stands: the share of all letters that come before it."""
    lengths = [len(message.content) for message in messages]
    return (sum(lengths[:place]) + start) / sum(lengths)


def count_message_tokens(messages: Sequence[Message], count_tokens: Callable[[str], int]) -> int:
    """What the messages take, the marks around each included."""
    return sum(count_tokens(message.content) + MESSAGE_MARKER_TOKENS for message in messages)
