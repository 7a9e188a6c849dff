"""Self-study of a text: conversations about it that a cartridge is trained on.

Eyuboglu et al., "Cartridges: Lightweight and general-purpose long context representations via
self-study" (2025), arXiv:2506.06266, section 4.1: the model asks itself about parts of the text and
answers with the text before it. A small model asks poor questions, so most conversations here are
made of the text itself: facts with words left out, parts to recite behind a cue, and parts to
continue. Questions that somebody has written about the text are never used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from larder.core.conversation import Conversation
from larder.core.errors import BadParameter, InputError
from larder.engine.engine import Engine
from larder.engine.sampler import SamplingParams
from larder.session.memory import ConversationMemory

SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
# Names and numbers, the facts of a sentence.
NAME = r"(?!I\b)[A-Z][\w'-]+"
FACT = re.compile(rf"(?<=\s)(?:{NAME}(?:\s{NAME})*|\d[\w:,.-]*\w|\d)")
BLANK = "___"
FACT_PROMPTS = (
    'Which words are missing in "{}"?',
    'Fill in the blank: "{}"',
    'What was said where "{}" has a blank?',
)
RECITE_PROMPT = 'Repeat what follows behind "{}".'
CONTINUE_PROMPT = 'Continue the text: "{}"'
ASK_PROMPT = 'Ask one short question whose answer is in this part: "{}"'
CUE_WORDS, RECITED_WORDS, CONTINUED_WORDS, PART_WORDS = 8, 36, 24, 60
QUESTION_TOKENS, ANSWER_TOKENS = 32, 40
TEMPERATURE = 0.7


@dataclass(frozen=True)
class StudyCounts:
    """Number of conversations of each kind.

    Args:
        facts: sentences with a name, a number or their last words left out.
        recitals: parts to repeat behind a cue.
        continuations: parts to continue.
        questions: asked and answered by the model, which takes most of the time.
    """

    facts: int = 160
    recitals: int = 80
    continuations: int = 40
    questions: int = 16

    def __post_init__(self) -> None:
        counts = self.facts, self.recitals, self.continuations, self.questions
        if min(counts) < 0 or not any(counts):
            raise BadParameter(f"Self-study needs conversations of at least one kind, got {self}.")


@dataclass(frozen=True)
class StudyConversation:
    """Question and answer as texts."""

    question: str
    answer: str


def study_conversations(
    engine: Engine, memory: ConversationMemory, counts: StudyCounts, seed: int
) -> Iterator[StudyConversation]:
    """Conversations about the text of a memory.

    Args:
        memory: full cache of the text.

    Raises:
        InputError: the text has too few words.
    """
    source = Random(seed)
    words, sentences = text_of(memory.conversation).split(), sentences_of(memory.conversation)
    if len(words) <= PART_WORDS or not sentences:
        raise InputError(
            f"A text of {len(words)} words is too short for self-study: give one of more than "
            f"{PART_WORDS}."
        )
    yield from facts(sentences, counts.facts, source)
    yield from parts(words, RECITE_PROMPT, (CUE_WORDS, RECITED_WORDS), counts.recitals, source)
    sizes = CONTINUED_WORDS, CONTINUED_WORDS
    yield from parts(words, CONTINUE_PROMPT, sizes, counts.continuations, source)
    for _ in range(counts.questions):
        yield ask_about_part(engine, memory, words, source)


def text_of(conversation: Conversation) -> str:
    """Text of all messages."""
    return "\n".join((conversation.opening, *(m.content for m in conversation.messages)))


def sentences_of(conversation: Conversation) -> list[str]:
    """Sentences of some words."""
    found = [sentence.strip() for sentence in SENTENCE.split(text_of(conversation))]
    return [sentence for sentence in found if len(sentence.split()) >= 4]


def facts(sentences: Sequence[str], count: int, source: Random) -> Iterator[StudyConversation]:
    """Sentences with a fact left out: those with a name or number first, then all in turn."""
    telling = [sentence for sentence in sentences if FACT.search(sentence)]
    others = [sentence for sentence in sentences if not FACT.search(sentence)]
    for group in (telling, others):
        source.shuffle(group)
    rounds = [*telling, *telling, *others]
    for number in range(count):
        sentence = rounds[number % len(rounds)]
        found = [match.span() for match in FACT.finditer(sentence)]
        start, stop = source.choice(found) if found else _last_words(sentence)
        blank = sentence[:start] + BLANK + sentence[stop:]
        prompt = source.choice(FACT_PROMPTS).format(blank)
        yield StudyConversation(prompt, sentence[start:stop])


def parts(
    words: Sequence[str], prompt: str, sizes: tuple[int, int], count: int, source: Random
) -> Iterator[StudyConversation]:
    """Parts of the text: some words are given, and the words behind them are the answer.

    Args:
        sizes: words that are given, and words of the answer.
    """
    given, answered = sizes
    for _ in range(count):
        start = source.randrange(len(words) - given)
        cut = start + given
        answer = " ".join(words[cut : cut + answered])
        yield StudyConversation(prompt.format(" ".join(words[start:cut])), answer)


def ask_about_part(
    engine: Engine, memory: ConversationMemory, words: Sequence[str], source: Random
) -> StudyConversation:
    """Question that the model asks about a part of the text, and its answer."""
    start = source.randrange(len(words) - PART_WORDS)
    prompt = ASK_PROMPT.format(" ".join(words[start : start + PART_WORDS]))
    sampling = SamplingParams(temperature=TEMPERATURE, seed=source.randrange(2**32))
    question = engine.ask(memory, prompt, sampling, QUESTION_TOKENS).text.strip() or prompt
    answer = engine.ask(memory, question, max_new_tokens=ANSWER_TOKENS).text.strip()
    return StudyConversation(question, answer)


def _last_words(sentence: str) -> tuple[int, int]:
    """Span of the last two words, without the full stop."""
    end = len(sentence.rstrip(".!?"))
    return sentence[:end].rpartition(" ")[0].rfind(" ") + 1, end
