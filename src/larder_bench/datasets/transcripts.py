"""Runs of real transcripts, and the questions whose evidence lies in them.

LoCoMo and RealTalk say for each question which utterances answer it. A run starts with a session
and goes on for as many utterances as there is room for; what it does not answer is left out.
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

from larder.core.conversation import Conversation, Message
from larder.core.errors import InputError, TooLittle
from larder.session.files import read_conversation
from larder.session.files.dialogue import session_numbers
from larder.session.transcript.tokenizer_adapter import ACKNOWLEDGEMENT
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS, relative_depth
from larder_bench.datasets.sources import TaskSources

UTTERANCE_ID = re.compile(r"D(\d+):(\d+)")
UTTERANCE_RANGE = re.compile(r"D\d+:\d+(?:\s*-\s*D\d+:\d+)?")  # a range is one place
HEADER = "DATE: "
UNANSWERABLE = 5  # LoCoMo's category of questions that `read_conversation` leaves out


@dataclass(frozen=True)
class AnnotatedTranscript:
    """A transcript as it is read, and where its evidence lies.

    Args:
        numbers: of each message, its session and its place there, both counted from 1.
        evidence: of each question, the numbers that it names; empty if it names none.
        costs: tokens of each message.
    """

    conversation: Conversation
    numbers: tuple[tuple[int, int], ...]
    evidence: tuple[tuple[tuple[int, int], ...], ...]
    costs: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        """The first message of each session."""
        messages = enumerate(self.conversation.messages)
        return [n for n, message in messages if message.content.lstrip().startswith(HEADER)]


@dataclass(frozen=True)
class TranscriptExcerpt:
    """The messages [start, stop) of a transcript, in place of which stands a conversation."""

    real: AnnotatedTranscript
    start: int
    stop: int

    def conversation(self, questions: int | None, random: Random) -> Conversation:
        """The run with the questions that it answers, so many of them at most."""
        whole = self.real.conversation
        messages = _trimmed(whole.messages[self.start : self.stop])
        asked = [
            replace(question, depth=self._depth(evidence, messages))
            for question, evidence in zip(whole.questions, self.real.evidence, strict=True)
            if self._answers(evidence)
        ]
        if questions is not None and len(asked) > questions:
            asked = random.sample(asked, questions)
        return replace(whole, messages=messages, questions=tuple(asked))

    def _answers(self, evidence: Sequence[tuple[int, int]]) -> bool:
        """Whether all of it lies within; evidence that is not named may lie anywhere."""
        if not evidence:
            return self.stop - self.start == len(self.real.numbers)
        within = set(self.real.numbers[self.start : self.stop])
        return within.issuperset(evidence)

    def _depth(
        self, evidence: Sequence[tuple[int, int]], messages: Sequence[Message]
    ) -> float | None:
        if len(set(evidence)) != 1:
            return None
        return relative_depth(messages, self.real.numbers.index(evidence[0]) - self.start)


def excerpt_conversation(
    name: str, seed: int, tokens: int, questions: int | None, sources: TaskSources
) -> Conversation:
    """A run of a file of the folder `name`, and questions that it answers.

    Raises:
        TooLittle: no run answers anything.
    """
    random, real = Random(seed), load_transcript(name, seed, sources)
    opening = sources.count_tokens(real.conversation.opening)
    left = tokens - opening - sources.count_tokens(ACKNOWLEDGEMENT) - 2 * MESSAGE_MARKER_TOKENS
    starts = real.starts
    for start in random.sample(starts, len(starts)):
        made = cut_excerpt(real, start, left).conversation(questions, random)
        if made.questions:
            return replace(made, name=f"{name}-{tokens}-{seed}")
    raise TooLittle(
        f"{name}.tokens must hold what answers a question, got {tokens}: write more tokens."
    )


def cut_excerpt(real: AnnotatedTranscript, start: int, tokens: int) -> TranscriptExcerpt:
    """As many messages from `start` on as `tokens` hold; where all do, sessions before it, too."""
    costs = real.costs
    fits = sum(total <= tokens for total in accumulate(costs[start:]))
    stop = start + fits
    if stop == len(costs):
        left = tokens - sum(costs[start:])
        for earlier in reversed([first for first in real.starts if first < start]):
            if sum(costs[earlier:start]) > left:
                break
            left -= sum(costs[earlier:start])
            start = earlier
    return TranscriptExcerpt(real, start, stop)


def load_transcript(name: str, seed: int, sources: TaskSources) -> AnnotatedTranscript:
    """The file of the folder `name` that a seed stands for, by turns.

    Raises:
        UsageError: no folder of that name was named.
        InputError: it holds no file, or one that is no such transcript.
    """
    folder = sources.folder(name)
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise InputError(f"{folder} must hold transcripts as .json files, and holds none.")
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
    asked = [entry for entry in data.get("qa", []) if _answerable(entry, data)]
    if len(numbers) != len(conversation.messages) or len(asked) != len(conversation.questions):
        raise InputError(f"{path} is no transcript of LoCoMo or RealTalk: name another folder.")
    evidence = tuple(tuple(_evidence_ids(entry)) for entry in asked)
    counted = zip(conversation.questions, map(_sources, asked), strict=True)
    conversation = replace(
        conversation,
        questions=tuple(replace(question, sources=count) for question, count in counted),
    )
    costs = tuple(count_tokens(message.content) for message in conversation.messages)
    return AnnotatedTranscript(conversation, numbers, evidence, costs)


def _answerable(entry: dict[str, Any], data: dict[str, Any]) -> bool:
    return "conversation" not in data or entry["category"] != UNANSWERABLE


def _evidence_ids(entry: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Ends of a range stand for it: what lies in a run with both lies in it, too."""
    for text in entry.get("evidence") or ():
        for session, number in UTTERANCE_ID.findall(str(text)):
            yield int(session), int(number)


def _sources(entry: dict[str, Any]) -> int | None:
    """How many places it names."""
    places = {
        place
        for text in entry.get("evidence") or ()
        for place in UTTERANCE_RANGE.findall(str(text))
    }
    return len(places) or None


def _trimmed(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The header of the first session stands at the start, without the blank line before it."""
    if not messages:
        return ()
    first = replace(messages[0], content=messages[0].content.lstrip("\n"))
    return (first, *messages[1:])
