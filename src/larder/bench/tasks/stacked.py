"""LongMemEval's questions over histories that are stacked from its sessions, with a fixed seed.

Di Wu et al., "LongMemEval: Benchmarking Chat Assistants on Long-Term Interactive Memory" (2024),
arXiv:2410.10813. The folder `longmemeval` of `--data` holds one of the release's files, such as
`longmemeval_s.json`. A history holds the evidence sessions of several questions and, where room is
left, other sessions of the file, all in the order of their dates. The released script draws without
a seed and keeps what contradicts apart; here equal seeds give equal histories, and sessions that
are evidence of a question not asked are left out. Questions without an answer (`_abs`) are not
asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from larder.bench.json_lines import Fields, field_of, read_list
from larder.bench.lifelog import tokens_of
from larder.bench.sources import Sources
from larder.bench.task import Task
from larder.core.conversation import Conversation, Message, Question
from larder.core.errors import BadParameter, InputError, TooLittle

FOLDER = "longmemeval"
ABSTAINING = "_abs"
MOST = 999  # sessions of a history; no number takes more tokens


@dataclass(frozen=True)
class Session:
    """One sitting of a history, by its id."""

    id: str
    date: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Entry:
    """A question, and the ids of the sessions that answer it."""

    question: Question
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Release:
    """What a file holds; a session that several histories share is there once.

    Args:
        evidence: the ids of all sessions that answer anything, or show that nothing does.
    """

    entries: tuple[Entry, ...]
    sessions: dict[str, Session]
    evidence: frozenset[str]


@dataclass(frozen=True)
class Stacked(Task):
    """A history of many sessions.

    Args:
        questions: the most that are asked; as many as their evidence leaves room for.
    """

    questions: int = 10

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"stacked.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: Sources) -> Conversation:
        random, release = Random(seed), _release(sources)
        costs = {id: _cost(session, sources) for id, session in release.sessions.items()}
        asked, taken, left = list[Entry](), dict[str, None](), tokens
        for entry in random.sample(release.entries, len(release.entries)):
            new = [id for id in entry.evidence if id not in taken]
            if len(asked) == self.questions or sum(costs[id] for id in new) > left:
                continue
            left -= sum(costs[id] for id in new)
            taken |= dict.fromkeys(new)
            asked.append(entry)
        if not asked:
            raise TooLittle(f"stacked.tokens must hold the evidence of a question, got {tokens}.")
        for id in random.sample(sorted(costs), len(costs)):
            if id not in release.evidence and costs[id] <= left:
                taken[id] = None
                left -= costs[id]
        stack = sorted((release.sessions[id] for id in taken), key=lambda one: (one.date, one.id))
        messages = tuple(message for n, one in enumerate(stack, 1) for message in _written(one, n))
        questions = tuple(entry.question for entry in asked)
        return Conversation(f"stacked-{tokens}-{seed}", messages, questions)


def _written(session: Session, number: int) -> Iterator[Message]:
    yield Message("system", f"Session {number}, {session.date}", date=session.date)
    yield from session.messages


def _cost(session: Session, sources: Sources) -> int:
    return tokens_of(list(_written(session, MOST)), sources.count_tokens)


def _release(sources: Sources) -> Release:
    folder = sources.folder(FOLDER)
    paths = sorted(folder.glob("*.json"))
    if len(paths) != 1:
        raise InputError(
            f"{folder} must hold one .json file of the release, such as longmemeval_s.json, and "
            f"holds {len(paths)}."
        )
    return sources.once(paths[0], _read)


def _read(path: Path) -> Release:
    entries, sessions, evidence = list[Entry](), dict[str, Session](), set[str]()
    for fields in read_list(path):
        for id, date, said in _histories(fields, path.name):
            messages = tuple(Message(turn["role"], str(turn["content"])) for turn in said)
            if messages:
                sessions.setdefault(id, Session(id, date, messages))
        entry = _entry(fields, path.name)
        evidence.update(entry.evidence)
        if not str(field_of(fields, "question_id", path.name)).endswith(ABSTAINING):
            entries.append(entry)
    known = [entry for entry in entries if sessions.keys() >= set(entry.evidence)]
    if not known:
        raise InputError(f"{path} holds no question that its sessions answer.")
    return Release(tuple(known), sessions, frozenset(evidence))


def _histories(fields: Fields, name: str) -> Sequence[tuple[str, str, Any]]:
    keys = ("haystack_session_ids", "haystack_dates", "haystack_sessions")
    ids, dates, said = (field_of(fields, key, name) for key in keys)
    if not len(ids) == len(dates) == len(said):
        raise InputError(f"a sample of {name} must have as many {keys[0]} as {keys[2]}.")
    return list(zip(map(str, ids), map(str, dates), said, strict=True))


def _entry(fields: Fields, name: str) -> Entry:
    question, answer, kind, evidence = (
        field_of(fields, key, name)
        for key in ("question", "answer", "question_type", "answer_session_ids")
    )
    return Entry(Question(str(question), str(answer), str(kind)), tuple(map(str, evidence)))


Part = Stacked
