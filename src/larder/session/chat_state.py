"""Chat state between turns, its record, and the open turn with its undo and commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from larder.cache.recurrent_state import CacheCheckpoint
from larder.cache.sequence import SequenceCache
from larder.core.errors import Damaged
from larder.prefill.turn_reader import TurnReader
from larder.session.caches import SessionCaches
from larder.session.capacity import cache_figures
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.prefill import ModelRuntime
from larder.session.routing import EpisodeMatch
from larder.session.transcript.chat_log import ChatLog

SCHEMA = 1


@dataclass(frozen=True)
class ChatState:
    """Immutable state of a chat between two turns.

    Args:
        refreshes: number of cache rebuilds.
        opened: number of episodes that turns have opened.
        uncut: entries per kv head that each cache would hold without the evictions after turns
            since it was built; a cache without a number counts as just built.
    """

    memory: ConversationMemory
    log: ChatLog
    refreshes: int = 0
    opened: int = 0
    uncut: tuple[int, ...] = ()


def chat_state_record(state: ChatState) -> bytes:
    """JSON record of a state, without its log and its caches."""
    record = {
        "schema": SCHEMA,
        "turns": len(state.log.turns),
        "counts": [state.refreshes, state.opened],
        "uncut": list(state.uncut),
        "router": state.memory.router.to_record(),
    }
    return json.dumps(record, ensure_ascii=False).encode()


def restore_chat_state(
    data: bytes | None,
    ids: Sequence[int],
    caches: Sequence[SequenceCache],
    runtime: ModelRuntime,
    policy: Policy,
    log: ChatLog,
    seconds: float,
) -> ChatState:
    """Restore a state from its record and its caches, which it takes over.

    Args:
        data: record by `chat_state_record`.
        ids: all token ids of the saved state.
        log: chat log, as long as that of the saved state or longer; later turns are left out.
        seconds: time that loading took so far.

    Raises:
        Damaged: the record is damaged, or does not fit the log or the caches.
    """
    known = _parsed_record(data)
    try:
        log = replace(log, turns=log.turns[: known["turns"]])
        refreshes, opened = map(int, known["counts"])
        uncut = tuple(map(int, known.get("uncut", ())))
        router = policy.session.restore_router(known["router"], runtime.embedder)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"The saved state of the chat cannot be used ({error}).") from error
    transcript = log.transcript(runtime.tokenizer)
    if log.prefill_input(transcript).ids != tuple(ids) or len(caches) != max(
        1, len(router.prompts())
    ):
        raise Damaged("The saved state of the chat does not fit its log or its caches.")
    spec = runtime.decoder.spec
    session_caches = SessionCaches(spec, caches)
    figures = cache_figures(
        policy,
        spec,
        session_caches,
        context_tokens=len(ids),
        peak_kv_bytes=session_caches.nbytes,
        peak_entries=max(cache.entries for cache in session_caches.usage()),
        prefill_seconds=seconds,
    )
    memory = ConversationMemory(policy, log.history, transcript, session_caches, router, figures)
    return ChatState(memory, log, refreshes, opened, uncut)


def parse_chat_record(data: bytes | None, schema: int, subject: str) -> dict[str, Any]:
    """JSON object of a schema, as it is kept beside the caches of a chat.

    Args:
        subject: what the data is, for errors.

    Raises:
        Damaged: the data is none, no JSON, or of another schema.
    """
    try:
        record = json.loads(data or b"")
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{subject} is not JSON: discard it.") from error
    if not isinstance(record, dict) or record.get("schema") != schema:
        raise Damaged(f"{subject} is not of schema {schema}: discard it.")
    return record


def _parsed_record(data: bytes | None) -> dict[str, Any]:
    record = parse_chat_record(data, SCHEMA, "The saved state of the chat")
    if type(record.get("turns")) is not int or record["turns"] < 0:
        raise Damaged("The saved state of the chat does not give the number of its turns.")
    return record


@dataclass(frozen=True)
class ActiveTurn:
    """Open turn: the cache that answers, and its state before the turn.

    Args:
        number: number of the cache.
        match: episode of the question; None without episodes.
        start: the cache before the first token of the question.
        reader: reads the turn into the cache.
        plans: number of plans that the cache had executed before.
        is_copy: whether `cache` is a copy, which replaces the original on commit; otherwise
            `ChatCache.abort_turn` undoes the turn.
    """

    number: int
    cache: SequenceCache
    match: EpisodeMatch | None
    start: CacheCheckpoint
    reader: TurnReader
    plans: int
    is_copy: bool = False

    @property
    def start_position(self) -> int:
        """True position of the first token of the question."""
        return self.start.position

    @property
    def is_planned(self) -> bool:
        """True once truncation can no longer undo the turn."""
        return self.is_copy or self.cache.plans != self.plans

    @property
    def copy(self) -> SequenceCache | None:
        """Cache held in addition to those of the session, so that the turn can be undone."""
        return self.cache if self.is_copy else self.reader.snapshot

    @property
    def can_be_undone(self) -> bool:
        """True if the cache can be restored to its state before the turn."""
        return not self.is_planned or self.is_copy or self.reader.snapshot is not None


@dataclass(frozen=True)
class TurnUndo:
    """State before a turn, and the cache to truncate to `start_position`."""

    state: ChatState
    number: int
    start_position: int


@dataclass(frozen=True)
class TurnCommit:
    """State after a turn, and the number of the cache that holds the turn."""

    state: ChatState
    number: int
