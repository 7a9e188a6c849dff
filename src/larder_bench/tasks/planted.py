"""Life-log facts planted in a real conversation, for models that answer no other questions.

No paper for the planting; the conversations are those of Adyasha Maharana et al., "Evaluating Very
Long-Term Conversational Memory of LLM Agents" (2024), arXiv:2402.17753, or of Dong-Ho Lee et al.,
"REALTALK: A 21-Day Real-World Dataset for Long-Term Conversation" (2025), arXiv:2502.13270, from
the folder `locomo` or `realtalk` of `--data`. The first speaker becomes the user, the other one the
assistant; the user states facts in separate messages, none about anything that the conversation
mentions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from random import Random

from larder.core import BadParameter, Conversation, Message, Question, TooLittle
from larder.session import utterance_text
from larder_bench.datasets.grammar import Attribute, Grammar, draw_value
from larder_bench.datasets.lifelog_sessions import count_message_tokens, relative_depth
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.transcripts import (
    HEADER,
    AnnotatedTranscript,
    TranscriptExcerpt,
    cut_excerpt,
    load_transcript,
)
from larder_bench.tasks.base import BenchTask

KIND = "planted"
EXCERPT_SLACK = 2  # a transcript takes more tokens than the chat built from it


class TranscriptSource(Enum):
    """Source of the conversation."""

    LOCOMO = "locomo"
    REALTALK = "realtalk"


@dataclass(frozen=True)
class PlantedFact:
    """Statement of a fact, its question and its value."""

    statement: str
    question: str
    value: str


@dataclass(frozen=True)
class Planted(BenchTask):
    """Real conversation as a chat, with planted facts.

    Args:
        of: data set.
        facts: number of planted facts; each is asked for.
    """

    of: TranscriptSource = TranscriptSource.LOCOMO
    facts: int = 12

    def __post_init__(self) -> None:
        if self.facts < 1:
            raise BadParameter(f"planted.facts must be 1 or more, got {self.facts}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, transcript = Random(seed), load_transcript(self.of.value, seed, sources)
        count, grammar = sources.count_tokens, sources.grammar
        facts = _facts(transcript, grammar, random, self.facts)
        pairs = [_fact_messages(fact, grammar, random) for fact in facts]
        left = tokens - sum(count_message_tokens(pair, count) for pair in pairs)
        run = cut_excerpt(
            transcript, random.choice(transcript.starts), EXCERPT_SLACK * max(0, left)
        )
        chat = _fitting(transcript, run, left, sources)
        turns = [n for n, message in enumerate(chat) if message.role == "user"]
        if not turns:
            raise TooLittle(f"planted.tokens must hold {self.facts} facts and more, got {tokens}.")
        positions = sorted(random.choice(turns) for _ in facts)
        messages, questions, start = list[Message](), list[tuple[PlantedFact, int]](), 0
        for position, pair, fact in zip(positions, pairs, facts, strict=True):
            messages += chat[start:position]
            questions.append((fact, len(messages)))
            messages += pair
            start = position
        messages += chat[start:]
        shuffled = (
            Question(fact.question, fact.value, KIND, relative_depth(messages, index), sources=1)
            for fact, index in random.sample(questions, len(questions))
        )
        return Conversation(f"{KIND}-{tokens}-{seed}", tuple(messages), tuple(shuffled))


def _facts(
    transcript: AnnotatedTranscript, grammar: Grammar, random: Random, count: int
) -> list[PlantedFact]:
    """Facts about different things that the transcript does not mention."""
    text = "".join(message.content for message in transcript.conversation.messages).lower()
    subjects = [
        (entity, attribute)
        for topic in grammar.topics
        for entity in topic.entities
        for attribute in topic.attributes
        if entity.lower() not in text
    ]
    if len(subjects) < count:
        raise BadParameter(f"planted.facts must be {len(subjects)} or less, got {count}.")
    return [
        _fact(entity, attribute, grammar, random)
        for entity, attribute in random.sample(subjects, count)
    ]


def _fact(entity: str, attribute: Attribute, grammar: Grammar, random: Random) -> PlantedFact:
    value = draw_value(attribute.value_kind, grammar.words, random)
    statement = random.choice(attribute.statements).replace("{E}", entity).replace("{V}", value)
    question = random.choice(attribute.questions).replace("{E}", entity)
    return PlantedFact(statement, question, value)


def _fact_messages(fact: PlantedFact, grammar: Grammar, random: Random) -> list[Message]:
    lead = random.choice(grammar.openers)
    statement = fact.statement
    text = f"{lead} {statement}." if lead else f"{statement[0].upper()}{statement[1:]}."
    answer = random.choice(grammar.acknowledgements)
    return [Message("user", text), Message("assistant", answer)]


def _chat(transcript: AnnotatedTranscript, run: TranscriptExcerpt) -> Iterator[Message]:
    """Excerpt as a chat: a header before each session, consecutive utterances of a speaker
    merged.
    """
    first = transcript.conversation.messages[0].speaker
    numbered = zip(transcript.numbers, transcript.conversation.messages, strict=True)
    within = list(numbered)[run.start : run.stop]
    for session, group in groupby(within, key=lambda one: one[0][0]):
        utterances = [message for _, message in group]
        yield Message("system", f"Session {session}, {_date(utterances[0])}")
        for speaker, row in groupby(utterances, key=lambda message: message.speaker):
            text = " ".join(utterance_text(message) for message in row)
            yield Message("user" if speaker == first else "assistant", text)


def _date(message: Message) -> str:
    """Date of a session header; not every message of a session has the same time."""
    line = message.content.lstrip().partition("\n")[0]
    return line.removeprefix(HEADER) if line.startswith(HEADER) else message.date


def _fitting(
    transcript: AnnotatedTranscript, run: TranscriptExcerpt, tokens: int, sources: TaskSources
) -> list[Message]:
    """Chat of the longest part of an excerpt that fits into `tokens`."""

    def count_tokens_until(stop: int) -> int:
        chat = list(_chat(transcript, replace(run, stop=stop)))
        return count_message_tokens(chat, sources.count_tokens)

    stops = range(run.start, run.stop + 1)
    fitting = bisect_right(stops, tokens, key=count_tokens_until)
    return list(_chat(transcript, replace(run, stop=run.start + fitting - 1))) if fitting else []


Part = Planted
