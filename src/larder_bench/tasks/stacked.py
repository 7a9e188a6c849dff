"""LongMemEval questions over histories that are stacked from its sessions, with a fixed seed.

Di Wu et al., "LongMemEval: Benchmarking Chat Assistants on Long-Term Interactive Memory" (2024),
arXiv:2410.10813. The folder `longmemeval` of `--data` holds one of the release's files, such as
`longmemeval_s.json`. A history holds the evidence sessions of several questions and, if they fit,
other sessions of the file, all ordered by date. The released script draws without a seed and keeps
contradictions apart; here equal seeds give equal histories, and sessions that are evidence of a
question not asked are left out. Questions without an answer (`_abs`) are not asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from larder.core import BadParameter, Conversation, InputError, Message, Question, TooLittle
from larder_bench.datasets.json_lines import Fields, read_list, required_field
from larder_bench.datasets.lifelog_sessions import count_message_tokens
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask

FOLDER = "longmemeval"
ABSTENTION_SUFFIX = "_abs"
MAX_SESSIONS = 999  # sessions of a history; no session number takes more tokens


@dataclass(frozen=True)
class HistorySession:
    """Session of a history."""

    id: str
    date: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class HistoryQuestion:
    """Question, and the ids of the sessions that answer it."""

    question: Question
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class LongMemEvalRelease:
    """Contents of a release file; a session shared by several histories appears once.

    Args:
        evidence: ids of all sessions that are evidence of any question, answerable or not.
    """

    entries: tuple[HistoryQuestion, ...]
    sessions: dict[str, HistorySession]
    evidence: frozenset[str]


@dataclass(frozen=True)
class Stacked(BenchTask):
    """History of many sessions.

    Args:
        questions: maximum number of questions; as many as their evidence fits.
    """

    questions: int = 10

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"stacked.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, release = Random(seed), _release(sources)
        costs = {id: _cost(session, sources) for id, session in release.sessions.items()}
        selected, taken, left = list[HistoryQuestion](), dict[str, None](), tokens
        for entry in random.sample(release.entries, len(release.entries)):
            new = [id for id in entry.evidence if id not in taken]
            if len(selected) == self.questions or sum(costs[id] for id in new) > left:
                continue
            left -= sum(costs[id] for id in new)
            taken |= dict.fromkeys(new)
            selected.append(entry)
        if not selected:
            raise TooLittle(f"stacked.tokens must hold the evidence of a question, got {tokens}.")
        for id in random.sample(sorted(costs), len(costs)):
            if id not in release.evidence and costs[id] <= left:
                taken[id] = None
                left -= costs[id]
        stack = sorted((release.sessions[id] for id in taken), key=lambda one: (one.date, one.id))
        messages = tuple(
            message for n, one in enumerate(stack, 1) for message in _session_messages(one, n)
        )
        questions = tuple(entry.question for entry in selected)
        return Conversation(f"stacked-{tokens}-{seed}", messages, questions)


def _session_messages(session: HistorySession, number: int) -> Iterator[Message]:
    yield Message("system", f"Session {number}, {session.date}", date=session.date)
    yield from session.messages


def _cost(session: HistorySession, sources: TaskSources) -> int:
    return count_message_tokens(
        list(_session_messages(session, MAX_SESSIONS)), sources.count_tokens
    )


def _release(sources: TaskSources) -> LongMemEvalRelease:
    folder = sources.folder(FOLDER)
    paths = sorted(folder.glob("*.json"))
    if len(paths) != 1:
        raise InputError(
            f"{folder} must hold one .json file of the release, such as longmemeval_s.json, and "
            f"holds {len(paths)}."
        )
    return sources.once(paths[0], _read)


def _read(path: Path) -> LongMemEvalRelease:
    entries, sessions, evidence = list[HistoryQuestion](), dict[str, HistorySession](), set[str]()
    for fields in read_list(path):
        for id, date, turns in _histories(fields, path.name):
            messages = tuple(Message(turn["role"], str(turn["content"])) for turn in turns)
            if messages:
                sessions.setdefault(id, HistorySession(id, date, messages))
        entry = _entry(fields, path.name)
        evidence.update(entry.evidence)
        if not str(required_field(fields, "question_id", path.name)).endswith(ABSTENTION_SUFFIX):
            entries.append(entry)
    known = [entry for entry in entries if sessions.keys() >= set(entry.evidence)]
    if not known:
        raise InputError(f"{path} holds no question that its sessions answer.")
    return LongMemEvalRelease(tuple(known), sessions, frozenset(evidence))


def _histories(fields: Fields, name: str) -> Sequence[tuple[str, str, Any]]:
    keys = ("haystack_session_ids", "haystack_dates", "haystack_sessions")
    ids, dates, sessions = (required_field(fields, key, name) for key in keys)
    if not len(ids) == len(dates) == len(sessions):
        raise InputError(f"a sample of {name} must have as many {keys[0]} as {keys[2]}.")
    return list(zip(map(str, ids), map(str, dates), sessions, strict=True))


def _entry(fields: Fields, name: str) -> HistoryQuestion:
    question, answer, kind, evidence = (
        required_field(fields, key, name)
        for key in ("question", "answer", "question_type", "answer_session_ids")
    )
    return HistoryQuestion(
        Question(str(question), str(answer), str(kind)), tuple(map(str, evidence))
    )


Part = Stacked
