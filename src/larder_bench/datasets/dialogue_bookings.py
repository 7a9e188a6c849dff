"""Conversations of a dialogue corpus, alone or among sessions of a life-log, and what was booked.

The wording and the layout are those that the bundled seed model was trained on; the dialogues come
from a corpus, such as that of Abhinav Rastogi et al., "Towards Scalable Multi-domain Conversational
Agents: The Schema-Guided Dialogue Dataset" (2020), arXiv:1909.05855.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from larder.core.conversation import Conversation, Question
from larder.core.errors import BadParameter, TooLittle
from larder_bench.datasets.corpus import Booking, Dialogue
from larder_bench.datasets.grammar import load_grammar
from larder_bench.datasets.lifelog_questions import draw_questions
from larder_bench.datasets.lifelog_sessions import LifeLog, LifeLogSession, count_message_tokens

DIALOGUES_PER_SESSION = (1, 1, 2)
SESSION_CHANCE = 0.15  # of asking when, not what
TRIES = 2000
MISFITS = 10  # dialogues differ much in length: a shorter one may still fit
QUESTION_TEMPLATES = (
    "For the {noun} whose {slot} was {value}, what was the {wanted}?",
    "What was the {wanted} of the {noun} with {slot} {value}?",
    "Remind me of the {wanted} of the {noun} ({slot}: {value}).",
)


@dataclass(frozen=True)
class StatedBooking:
    """A fact, its session, the number of its dialogue, and the message that states it last."""

    booking: Booking
    session: int
    number: int
    place: int


@dataclass
class BookingLog:
    """What was booked so far."""

    dialogues: Sequence[Dialogue]
    random: Random
    told: list[StatedBooking] = field(default_factory=list)
    drawn: int = 0

    def next_session(self, log: LifeLog) -> tuple[LifeLogSession, tuple[Dialogue, ...]]:
        """A session that could come next in a log, and the dialogues in it."""
        count = self.random.choice(DIALOGUES_PER_SESSION)
        chosen = tuple(self.random.choice(self.dialogues) for _ in range(count))
        messages = [message for dialogue in chosen for message in dialogue.messages]
        return LifeLogSession((log.header(), *messages), ()), chosen

    def keep(self, dialogues: Sequence[Dialogue], log: LifeLog) -> None:
        """Remember what was booked in the session that a log kept last."""
        place = len(log.messages) - sum(len(dialogue.messages) for dialogue in dialogues)
        for dialogue in dialogues:
            self.drawn += 1
            for booking in dialogue.bookings:
                stated = place + _stating_message(dialogue, booking.value)
                self.told.append(StatedBooking(booking, log.sessions, self.drawn, stated))
            place += len(dialogue.messages)

    def questions(self, count: int, log: LifeLog) -> tuple[Question, ...]:
        """Different questions, each about one dialogue that its key tells from all others.

        Raises:
            TooLittle: there are not so many.
        """
        found: dict[str, Question] = {}
        for _ in range(TRIES):
            if len(found) == count:
                return tuple(found.values())
            question = self._question(log)
            if question is not None:
                found.setdefault(question.question, question)
        raise TooLittle(
            f"bookings.questions is {count}, but only {len(found)} can be told apart: ask fewer, "
            "or write more tokens."
        )

    def _question(self, log: LifeLog) -> Question | None:
        told = self.random.choice(self.told)
        booking, depth = told.booking, log.depth(told.place)
        keys = [key for key in booking.keys if self._numbers(booking.noun, key) == {told.number}]
        if not keys:
            return None
        slot, value = self.random.choice(keys)
        if self.random.random() < SESSION_CHANCE:
            asked = (
                f"In which session did we talk about the {booking.noun} whose {slot} was {value}?"
            )
            return Question(asked, f"session {told.session}", "bksession", depth)
        asked = self.random.choice(QUESTION_TEMPLATES).format(
            noun=booking.noun, slot=slot, value=value, wanted=booking.slot
        )
        return Question(asked, booking.value, "booking", depth)

    def _numbers(self, noun: str, key: tuple[str, str]) -> set[int]:
        """The dialogues in which something of that name has that slot and value."""
        return {
            told.number
            for told in self.told
            if told.booking.noun == noun
            and key in ((told.booking.slot, told.booking.value), *told.booking.keys)
        }


def bookings_conversation(
    seed: int,
    tokens: int,
    count_tokens: Callable[[str], int],
    dialogues: Sequence[Dialogue],
    questions: int,
    share: float = 1.0,
) -> Conversation:
    """Sessions of at most `tokens` tokens in all, and questions; equal seeds, equal sessions.

    Args:
        seed: of everything random.
        tokens: the most that the messages may take, marks between them included.
        count_tokens: how many tokens a text is.
        dialogues: those to draw from.
        questions: how many to ask, all different; about life-log sessions in their share.
        share: of the sessions that are dialogues, in (0, 1]; the others are those of a life-log.

    Raises:
        BadParameter: the share is out of range.
        TooLittle: no session of a kind fits, or there is not enough to ask.
    """
    if not 0 < share <= 1:
        raise BadParameter(f"bookings.share must be in (0, 1], got {share}.")
    random = Random(seed)
    log, booked = LifeLog(load_grammar(), random), BookingLog(dialogues, random)
    _add_sessions(log, booked, tokens, count_tokens, share)
    if not booked.told or (share < 1 and not log.latest):
        raise TooLittle(f"bookings.tokens must hold sessions of all kinds, got {tokens}.")
    of_life = round(questions * (1 - share))
    asked = booked.questions(questions - of_life, log)
    asked += draw_questions(log, of_life) if of_life else ()
    name = "bookings" if share == 1 else "mixed"
    shuffled = tuple(random.sample(asked, len(asked)))
    return Conversation(f"{name}-{tokens}-{seed}", tuple(log.messages), shuffled)


def _add_sessions(
    log: LifeLog,
    booked: BookingLog,
    tokens: int,
    count_tokens: Callable[[str], int],
    share: float,
) -> None:
    """Keep sessions, of the two kinds by chance, until several in a row do not fit."""
    misfits = 0
    while misfits < MISFITS:
        dialogues: tuple[Dialogue, ...] = ()
        if booked.random.random() < share:
            session, dialogues = booked.next_session(log)
        else:
            session = log.next_session()
        if session is None:
            return
        taken = count_message_tokens(session.messages, count_tokens)
        if taken > tokens:
            misfits += 1
            continue
        tokens, misfits = tokens - taken, 0
        log.keep(session)
        booked.keep(dialogues, log)


def _stating_message(dialogue: Dialogue, value: str) -> int:
    """The last message that holds a value; the first where the value goes over two."""
    holding = (n for n, message in enumerate(dialogue.messages) if value in message.content)
    return max(holding, default=0)
