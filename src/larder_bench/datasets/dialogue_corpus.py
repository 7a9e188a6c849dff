"""Conversations of a dialogue corpus, alone or mixed with life-log sessions, and their bookings.

The wording and the layout are the ones that the bundled seed model was trained on; the dialogues
come from a corpus, such as that of Abhinav Rastogi et al., "Towards Scalable Multi-domain
Conversational Agents: The Schema-Guided Dialogue Dataset" (2020), arXiv:1909.05855.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from larder.core import BadParameter, Conversation, Question, TooLittle
from larder_bench.datasets.corpus import Booking, Dialogue
from larder_bench.datasets.grammar import load_grammar
from larder_bench.datasets.lifelog_questions import draw_questions
from larder_bench.datasets.lifelog_sessions import LifeLog, LifeLogSession, count_message_tokens

DIALOGUES_PER_SESSION = (1, 1, 2)
SESSION_CHANCE = 0.15  # of asking for the session instead of a slot
TRIES = 2000
MISFITS = 10  # dialogues that do not fit before giving up: a shorter one may still fit
QUESTION_TEMPLATES = (
    "For the {noun} whose {slot} was {value}, what was the {wanted}?",
    "What was the {wanted} of the {noun} with {slot} {value}?",
    "Remind me of the {wanted} of the {noun} ({slot}: {value}).",
)


@dataclass(frozen=True)
class StatedBooking:
    """Booking with its session, its dialogue's number, and the message that states it last."""

    booking: Booking
    session: int
    number: int
    message_index: int


@dataclass
class BookingLog:
    """Bookings of the sessions so far."""

    dialogues: Sequence[Dialogue]
    random: Random
    stated: list[StatedBooking] = field(default_factory=list)
    drawn: int = 0

    def next_session(self, log: LifeLog) -> tuple[LifeLogSession, tuple[Dialogue, ...]]:
        """Candidate for the next session of a log, and its dialogues."""
        count = self.random.choice(DIALOGUES_PER_SESSION)
        chosen = tuple(self.random.choice(self.dialogues) for _ in range(count))
        messages = [message for dialogue in chosen for message in dialogue.messages]
        return LifeLogSession((log.header(), *messages), ()), chosen

    def keep(self, dialogues: Sequence[Dialogue], log: LifeLog) -> None:
        """Record the bookings of the session that a log kept last."""
        first = len(log.messages) - sum(len(dialogue.messages) for dialogue in dialogues)
        for dialogue in dialogues:
            self.drawn += 1
            for booking in dialogue.bookings:
                message = first + _stating_message(dialogue, booking.value)
                self.stated.append(StatedBooking(booking, log.sessions, self.drawn, message))
            first += len(dialogue.messages)

    def questions(self, count: int, log: LifeLog) -> tuple[Question, ...]:
        """Different questions, each about a dialogue that its key identifies.

        Raises:
            TooLittle: the dialogues do not yield that many.
        """
        questions: dict[str, Question] = {}
        for _ in range(TRIES):
            if len(questions) == count:
                return tuple(questions.values())
            question = self._question(log)
            if question is not None:
                questions.setdefault(question.question, question)
        raise TooLittle(
            f"bookings.questions is {count}, but only {len(questions)} can be distinguished: ask "
            "fewer, or take more tokens."
        )

    def _question(self, log: LifeLog) -> Question | None:
        stated = self.random.choice(self.stated)
        booking, depth = stated.booking, log.depth(stated.message_index)
        keys = [key for key in booking.keys if self._numbers(booking.noun, key) == {stated.number}]
        if not keys:
            return None
        slot, value = self.random.choice(keys)
        if self.random.random() < SESSION_CHANCE:
            question = (
                f"In which session did we talk about the {booking.noun} whose {slot} was {value}?"
            )
            return Question(question, f"session {stated.session}", "bksession", depth)
        question = self.random.choice(QUESTION_TEMPLATES).format(
            noun=booking.noun, slot=slot, value=value, wanted=booking.slot
        )
        return Question(question, booking.value, "booking", depth)

    def _numbers(self, noun: str, key: tuple[str, str]) -> set[int]:
        """Numbers of the dialogues that have something of that name with that slot and value."""
        return {
            one.number
            for one in self.stated
            if one.booking.noun == noun
            and key in ((one.booking.slot, one.booking.value), *one.booking.keys)
        }


def bookings_conversation(
    seed: int,
    tokens: int,
    count_tokens: Callable[[str], int],
    dialogues: Sequence[Dialogue],
    questions: int,
    share: float = 1.0,
) -> Conversation:
    """Sessions of at most `tokens` tokens in total, with questions; equal seeds give equal
    sessions.

    Args:
        seed: seed of all random choices.
        tokens: maximum number of tokens of the messages, markers between them included.
        count_tokens: returns the number of tokens of a text.
        dialogues: dialogues to draw from.
        questions: number of questions, all different; life-log sessions get their share of them.
        share: share of sessions with dialogues, in (0, 1]; the others are life-log sessions.

    Raises:
        BadParameter: the share is out of range.
        TooLittle: no session of a kind fits, or there are too few questions.
    """
    if not 0 < share <= 1:
        raise BadParameter(f"bookings.share must be in (0, 1], got {share}.")
    random = Random(seed)
    log, booked = LifeLog(load_grammar(), random), BookingLog(dialogues, random)
    _add_sessions(log, booked, tokens, count_tokens, share)
    if not booked.stated or (share < 1 and not log.latest):
        raise TooLittle(f"bookings.tokens must hold sessions of all kinds, got {tokens}.")
    of_life = round(questions * (1 - share))
    selected = booked.questions(questions - of_life, log)
    selected += draw_questions(log, of_life) if of_life else ()
    name = "bookings" if share == 1 else "mixed"
    shuffled = tuple(random.sample(selected, len(selected)))
    return Conversation(f"{name}-{tokens}-{seed}", tuple(log.messages), shuffled)


def _add_sessions(
    log: LifeLog, booked: BookingLog, tokens: int, count_tokens: Callable[[str], int], share: float
) -> None:
    """Add random sessions of the two kinds until several in a row do not fit."""
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
    """Index of the last message that contains a value; 0 if the value spans two messages."""
    holding = (n for n, message in enumerate(dialogue.messages) if value in message.content)
    return max(holding, default=0)
