"""Excerpts of real transcripts, and the questions whose evidence they contain.

LoCoMo and RealTalk list the utterances that answer each question. An excerpt starts with a session
and has as many utterances as fit; questions that it does not answer are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from larder.core import Conversation, InputError, Message, TooLittle
from larder.session import ACKNOWLEDGEMENT, read_conversation, session_numbers
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS, relative_depth
from larder_bench.datasets.sources import TaskSources

UTTERANCE_ID = re.compile(r"D(\d+):(\d+)")
UTTERANCE_RANGE = re.compile(r"D\d+:\d+(?:\s*-\s*D\d+:\d+)?")  # a range counts once
HEADER = "DATE: "
UNANSWERABLE = 5  # LoCoMo's category of questions that `read_conversation` leaves out


@dataclass(frozen=True)
class AnnotatedTranscript:
    """Transcript with the evidence of its questions.

    Args:
        numbers: session of each message and its number there, both counted from 1.
        evidence: numbers that each question refers to; empty if it names none.
        costs: number of tokens of each message.
    """

    conversation: Conversation
    numbers: tuple[tuple[int, int], ...]
    evidence: tuple[tuple[tuple[int, int], ...], ...]
    costs: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        """First message of each session."""
        messages = enumerate(self.conversation.messages)
        return [n for n, message in messages if message.content.lstrip().startswith(HEADER)]


@dataclass(frozen=True)
class TranscriptExcerpt:
    """Messages [start, stop) of a transcript."""

    transcript: AnnotatedTranscript
    start: int
    stop: int

    def conversation(self, questions: int | None, random: Random) -> Conversation:
        """Excerpt with at most `questions` of the questions that it answers."""
        whole = self.transcript.conversation
        messages = _trimmed(whole.messages[self.start : self.stop])
        answered = [
            replace(question, depth=self._depth(evidence, messages))
            for question, evidence in zip(whole.questions, self.transcript.evidence, strict=True)
            if self._answers(evidence)
        ]
        if questions is not None and len(answered) > questions:
            answered = random.sample(answered, questions)
        return replace(whole, messages=messages, questions=tuple(answered))

    def _answers(self, evidence: Sequence[tuple[int, int]]) -> bool:
        """Test if the excerpt contains all evidence; evidence that is not named may be anywhere."""
        if not evidence:
            return self.stop - self.start == len(self.transcript.numbers)
        within = set(self.transcript.numbers[self.start : self.stop])
        return within.issuperset(evidence)

    def _depth(
        self, evidence: Sequence[tuple[int, int]], messages: Sequence[Message]
    ) -> float | None:
        if len(set(evidence)) != 1:
            return None
        return relative_depth(messages, self.transcript.numbers.index(evidence[0]) - self.start)


def excerpt_conversation(
    name: str, seed: int, tokens: int, questions: int | None, sources: TaskSources
) -> Conversation:
    """Excerpt of a file of the folder `name`, with questions that it answers.

    Raises:
        TooLittle: no excerpt answers a question.
    """
    random, transcript = Random(seed), load_transcript(name, seed, sources)
    opening = sources.count_tokens(transcript.conversation.opening)
    left = tokens - opening - sources.count_tokens(ACKNOWLEDGEMENT) - 2 * MESSAGE_MARKER_TOKENS
    starts = transcript.starts
    for start in random.sample(starts, len(starts)):
        conversation = cut_excerpt(transcript, start, left).conversation(questions, random)
        if conversation.questions:
            return replace(conversation, name=f"{name}-{tokens}-{seed}")
    raise TooLittle(
        f"{name}.tokens must hold the evidence of a question, got {tokens}: take more tokens."
    )


def cut_excerpt(transcript: AnnotatedTranscript, start: int, tokens: int) -> TranscriptExcerpt:
    """Excerpt of as many messages from `start` on as fit; if all do, earlier sessions are added."""
    costs = transcript.costs
    fits = sum(total <= tokens for total in accumulate(costs[start:]))
    stop = start + fits
    if stop == len(costs):
        left = tokens - sum(costs[start:])
        for earlier in reversed([first for first in transcript.starts if first < start]):
            if sum(costs[earlier:start]) > left:
                break
            left -= sum(costs[earlier:start])
            start = earlier
    return TranscriptExcerpt(transcript, start, stop)


def load_transcript(name: str, seed: int, sources: TaskSources) -> AnnotatedTranscript:
    """Transcript of the folder `name`; seeds select its files in turn.

    Raises:
        UsageError: the folder was not given.
        InputError: it contains no file, or one that is not such a transcript.
    """
    folder = sources.folder(name)
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise InputError(f"{folder} must hold transcripts as .json files, but holds none.")
    return sources.once(paths[seed % len(paths)], lambda path: _read(path, sources.count_tokens))


def _read(path: Path, count_tokens: Callable[[str], int]) -> AnnotatedTranscript:
    conversation = read_conversation(path)
    data = json.loads(path.read_text(encoding="utf-8-sig"))
    talk = data.get("conversation", data)
    numbers = tuple(
        (session, number)
        for session in session_numbers(talk)
        for number, _ in enumerate(talk[f"session_{session}"], start=1)
    )
    entries = [entry for entry in data.get("qa", []) if _answerable(entry, data)]
    if len(numbers) != len(conversation.messages) or len(entries) != len(conversation.questions):
        raise InputError(f"{path} is not a transcript of LoCoMo or RealTalk: name another folder.")
    evidence = tuple(tuple(_evidence_ids(entry)) for entry in entries)
    counted = zip(conversation.questions, map(_sources, entries), strict=True)
    conversation = replace(
        conversation,
        questions=tuple(replace(question, sources=count) for question, count in counted),
    )
    costs = tuple(count_tokens(message.content) for message in conversation.messages)
    return AnnotatedTranscript(conversation, numbers, evidence, costs)


def _answerable(entry: dict[str, Any], data: dict[str, Any]) -> bool:
    return "conversation" not in data or entry["category"] != UNANSWERABLE


def _evidence_ids(entry: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Numbers of the evidence; the two ends of a range stand for the whole range."""
    for text in entry.get("evidence") or ():
        for session, number in UTTERANCE_ID.findall(str(text)):
            yield int(session), int(number)


def _sources(entry: dict[str, Any]) -> int | None:
    """Number of passages of the evidence; None if it names none."""
    utterances = {
        utterance
        for text in entry.get("evidence") or ()
        for utterance in UTTERANCE_RANGE.findall(str(text))
    }
    return len(utterances) or None


def _trimmed(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages without the blank line before the first session header."""
    if not messages:
        return ()
    first = replace(messages[0], content=messages[0].content.lstrip("\n"))
    return (first, *messages[1:])
