"""State of one request from submission to its last token."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from larder.cache.sequence import SequenceCache
from larder.engine.detokenizer import IncrementalDetokenizer
from larder.server.request import ChatMessage, Listener, Report, Request, Ticket
from larder.server.session_backend.base import SessionBackend
from larder.server.session_state import (
    TOKEN_TYPECODE,
    CompletedTurn,
    GenerationParams,
    SavedCache,
    SessionState,
)
from larder.server.tiers.disk import LoadedCaches
from larder.session.chat_state import ActiveTurn, TurnCommit
from larder.store.ledger import Reservation


@dataclass
class RequestTimes:
    """Times in seconds of one clock; None for events that have not happened."""

    asked: float
    started: float | None = None
    first: float | None = None


@dataclass
class PromptTokenCounts:
    """Prompt tokens by source: cached, restored from a slower tier, recomputed."""

    cached: int = 0
    restored: int = 0
    recomputed: int = 0
    tier: str = "none"


@dataclass(frozen=True)
class CacheLoad:
    """A cache that is being loaded from the store.

    Args:
        source: the session it belongs to: the request's own, or one with a common prefix.
        usable_tokens: length of the prefix that the request can use.
        reservation: host memory for the load.
    """

    source: SessionState
    saved_cache: SavedCache
    usable_tokens: int
    reservation: Reservation
    future: Future[LoadedCaches]


@dataclass(eq=False)
class RequestState(Ticket):
    """State of one request. All but `cancel` is for the model's thread.

    Args:
        past_turns: completed turns that the prompt begins with.
        new_messages: messages after them.
        prompt_ids: all tokens before the answer.
        new_tokens: maximum number of generated tokens.
        wake: requests a step of the model's thread.
        backend: how the session holds its caches.
        cached_len: tokens in the cache before this request.
        prefill_blocks: blocks to prefill before the last prompt token; `next_block` is the index of
            the next one.
        prefill_steps: for chat sessions instead, a generator that prefills one block per step;
            `estimated_blocks` is an estimate of those left, `prefill_seconds` the time spent so
            far.
        load: cache load that must finish before the prefill.
        was_new: the session was created for this request.
        active_turn: the chat cache that answers.
        new_ids: the part of the prompt that a chat session's caches lack.
        prompt_tail: end of the prompt, read by the first decode step.
        finish_reason: set once the answer has ended while `closing_ids`, the end of the turn, is
            yet to be read.
        completed_turn: the turn to store, if its end was read in separate steps; else the last
            decode step completes it.
        turn_commit: the chat state after the turn.
        passed_blocks: blocks given to other requests of the tenant since this one had one.
        durable: as in `Report`.
    """

    request: Request
    listener: Listener
    session: SessionState
    past_turns: tuple[CompletedTurn, ...]
    new_messages: tuple[ChatMessage, ...]
    prompt_ids: tuple[int, ...]
    new_tokens: int
    times: RequestTimes
    wake: Callable[[], None]
    backend: SessionBackend
    counts: PromptTokenCounts = field(default_factory=PromptTokenCounts)
    cached_len: int = 0
    prefill_blocks: list[tuple[int, ...]] = field(default_factory=list)
    next_block: int = 0
    prefill_steps: Generator[object, None, None] | None = None
    estimated_blocks: int = 0
    prefill_seconds: float = 0.0
    active_turn: ActiveTurn | None = None
    new_ids: tuple[int, ...] = ()
    prompt_tail: tuple[int, ...] = ()
    finish_reason: str = ""
    closing_ids: tuple[int, ...] = ()
    completed_turn: CompletedTurn | None = None
    turn_commit: TurnCommit | None = None
    stream: IncrementalDetokenizer | None = None
    generator: torch.Generator | None = None
    output_ids: list[int] = field(default_factory=list)
    load: CacheLoad | None = None
    was_new: bool = False
    passed_blocks: int = 0
    durable: bool | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.wake()

    @property
    def is_prefilled(self) -> bool:
        """True if only the end of the prompt is left, which the first decode step reads."""
        return (
            self.load is None
            and self.prefill_steps is None
            and self.next_block == len(self.prefill_blocks)
        )

    @property
    def has_ended(self) -> bool:
        """True if the turn is complete and nothing is left to read."""
        return self.completed_turn is not None and self.is_prefilled

    @property
    def remaining_blocks(self) -> int:
        """Blocks left to prefill."""
        return (
            max(1, self.estimated_blocks)
            if self.prefill_steps is not None
            else len(self.prefill_blocks) - self.next_block
        )

    @property
    def cache(self) -> SequenceCache:
        """The cache that answers."""
        cache = self.session.residency.cache if self.active_turn is None else self.active_turn.cache
        assert cache is not None
        return cache

    @property
    def reads_prompt_tail(self) -> bool:
        """True if the next decode step reads a prompt tail, which may be as long as a block."""
        return not self.output_ids and len(self.step_ids) > 1

    @property
    def step_ids(self) -> tuple[int, ...]:
        """Input tokens of the next decode step."""
        if self.finish_reason:
            return self.closing_ids
        return (
            (self.output_ids[-1],)
            if self.output_ids
            else self.prompt_tail or (self.prompt_ids[-1],)
        )

    @property
    def workflow_steps(self) -> float:
        """Workflow steps until the session is used again, as the request announced."""
        announced = self.request.steps
        return float(announced.get("", announced.get(self.session.name, math.inf)))

    @property
    def prompt(self) -> array:
        """Prompt tokens that this request adds to the transcript."""
        before = sum(each.tokens for each in self.past_turns)
        return array(TOKEN_TYPECODE, self.prompt_ids[before:])

    def complete_turn(self, closing: Sequence[int], unread: int, reason: str) -> CompletedTurn:
        """The completed turn.

        Args:
            closing: tokens that end the answer's turn.
            unread: as `CompletedTurn.unread_tokens`.
        """
        assert self.stream is not None
        answer = array(TOKEN_TYPECODE, [*self.output_ids, *closing])
        return CompletedTurn(
            messages=self.new_messages,
            prompt_ids=self.prompt,
            text=self.stream.text.strip(),
            answer_ids=answer,
            unread_tokens=unread,
            params=GenerationParams.of(self.request),
            reason=reason,
        )

    def report(self, reason: str, now: float) -> Report:
        """Measurements of the request."""
        session, occupancy = self.session, self.session.residency.occupancy
        per_head = occupancy.entries // max(1, session.rule.heads)
        lost_entries = max(0, occupancy.read - per_head) if session.rule.is_limited else 0
        merges, times = session.rule.merges, self.times
        return Report(
            session=session.name,
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.counts.cached,
            restored_tokens=self.counts.restored,
            recomputed_tokens=self.counts.recomputed,
            new_tokens=len(self.output_ids),
            evicted_tokens=0 if merges else lost_entries,
            merged_tokens=lost_entries if merges else 0,
            lossless=session.residency.is_lossless,
            tier=self.counts.tier,
            reason=reason,
            wait_seconds=(now if times.started is None else times.started) - times.asked,
            first_seconds=(now if times.first is None else times.first) - times.asked,
            seconds=now - times.asked,
            durable=self.durable,
        )
