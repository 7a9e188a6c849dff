"""What a chat's caches do not say of its state: the way to them, and how they came to be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from larder.cache.sequence import SequenceCache
from larder.core.errors import Damaged
from larder.prefill.turn_reader import TurnReader
from larder.session.caches import SessionCaches
from larder.session.capacity import budget_tokens, layer_figures
from larder.session.episodes.matching import EpisodeMatch
from larder.session.memory import CacheFigures, ConversationMemory
from larder.session.policy import Policy
from larder.session.prefill import ModelRuntime
from larder.session.transcript.chat_log import ChatLog

SCHEMA = 1


@dataclass(frozen=True)
class ChatState:
    """A chat between two turns; each turn makes another one.

    Args:
        refreshes: how often caches had to be built anew.
        opened: how many episodes turns have opened.
        uncut: entries per kv head that each cache would hold, had no turn since it was built been
            cut down to the budget; a cache without a number counts as just built.
    """

    memory: ConversationMemory
    log: ChatLog
    refreshes: int = 0
    opened: int = 0
    uncut: tuple[int, ...] = ()


def chat_state_record(state: ChatState) -> bytes:
    """Everything of a state but its log and its caches."""
    record = {
        "schema": SCHEMA,
        "turns": len(state.log.exchanges),
        "counts": [state.refreshes, state.opened],
        "uncut": list(state.uncut),
        "router": state.memory.router.told(),
    }
    return json.dumps(record, ensure_ascii=False).encode()


def restore_chat_state(
    data: bytes | None,
    ids: Sequence[int],
    caches: Sequence[SequenceCache],
    desk: ModelRuntime,
    policy: Policy,
    log: ChatLog,
    seconds: float,
) -> ChatState:
    """The state that was told, over its caches, which are taken over.

    Args:
        data: from `chat_state_record`.
        ids: every token of that state.
        log: as long as that state's or longer; the state has the turns of its time alone.
        seconds: that loading took so far.

    Raises:
        Damaged: it is not what `chat_state_record` wrote, or another chat's.
    """
    known = _parsed_record(data)
    try:
        log = replace(log, exchanges=log.exchanges[: known["turns"]])
        refreshes, opened = map(int, known["counts"])
        uncut = tuple(map(int, known.get("uncut", ())))
        router = policy.session.restore_router(known["router"], desk.embedder)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"The saved state of the chat cannot be used ({error}).") from error
    transcript = log.transcript(desk.scribe)
    if log.source(transcript).ids != tuple(ids) or len(caches) != max(1, len(router.prompts())):
        raise Damaged("The saved state of the chat does not fit its log or its caches.")
    shelf, context = SessionCaches(desk.decoder.spec, caches), len(ids)
    held, spec = shelf.holdings(), desk.decoder.spec
    answering = max(held, key=lambda holding: holding.fast_tier_bytes)
    figures = CacheFigures(
        context_tokens=context,
        budget_tokens=min(budget_tokens(policy), context),
        full_kv_bytes=spec.full_bytes(context),
        kv_bytes=shelf.nbytes,
        active_kv_bytes=answering.fast_tier_bytes,
        peak_kv_bytes=shelf.nbytes,
        peak_entries=max(each.entries for each in held),
        prefill_seconds=seconds,
        layers=layer_figures(policy, spec, answering, context),
    )
    memory = ConversationMemory(policy, log.history, transcript, shelf, router, figures)
    return ChatState(memory, log, refreshes, opened, uncut)


def _parsed_record(data: bytes | None) -> dict[str, Any]:
    try:
        known = json.loads(data or b"")
    except (ValueError, RecursionError) as error:
        raise Damaged("The saved state of the chat is not JSON.") from error
    if not isinstance(known, dict) or known.get("schema") != SCHEMA:
        raise Damaged(f"The saved state of the chat is not of schema {SCHEMA}.")
    if type(known.get("turns")) is not int or known["turns"] < 0:
        raise Damaged("The saved state of the chat does not tell its turns.")
    return known


@dataclass(frozen=True)
class ActiveTurn:
    """The cache that answers a question, and where it stood before.

    Args:
        number: of the cache.
        mark: true position of the question's first token.
        turn: what reads the turn into the cache.
        plans: that the cache had carried out before.
        is_copy: whether `cache` is a copy, which takes the place of the cache once the turn is
            filed; else the turn is taken back by `Cabinet.undo`.
    """

    number: int
    cache: SequenceCache
    match: EpisodeMatch | None
    mark: int
    turn: TurnReader
    plans: int
    is_copy: bool = False

    @property
    def is_planned(self) -> bool:
        """Whether the turn can no longer be cut off the cache."""
        return self.is_copy or self.cache.plans != self.plans

    @property
    def copy(self) -> SequenceCache | None:
        """What is held beside the cache of the shelf, so that the turn can be undone."""
        return self.cache if self.is_copy else self.turn.snapshot

    @property
    def can_be_undone(self) -> bool:
        """Whether the cache can be had as it was before the turn."""
        return not self.is_planned or self.is_copy or self.turn.snapshot is not None


@dataclass(frozen=True)
class TurnUndo:
    """How to take a turn back: the state before, and the cache that has grown since `mark`."""

    state: ChatState
    number: int
    mark: int


@dataclass(frozen=True)
class TurnCommit:
    """The state behind a turn, and the number of the cache that holds the turn in it."""

    state: ChatState
    number: int
