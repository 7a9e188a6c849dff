"""State of one request from submission to its last token."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from larder.cache.sequence import SequenceCache
from larder.engine.constraint import ConstraintMatcher
from larder.engine.sampler import TokenSampler
from larder.prefill.base import ContextText
from larder.server.answer_text import AnswerText
from larder.server.image_prompts import ImagePart
from larder.server.request import Listener, Report, Request, Ticket
from larder.server.session_backend.base import SessionBackend
from larder.server.session_index import ResolvedSession
from larder.server.session_state import SavedCache, SessionState
from larder.server.tiers.disk import LoadedCaches
from larder.server.transcript import TOKEN_TYPECODE, CompletedTurn, GenerationParams, num_tokens
from larder.session.chat_state import ActiveTurn, TurnCommit
from larder.store.ledger import Reservation


@dataclass
class RequestTimes:
    """Times in seconds of one clock; None for events that have not happened."""

    arrived: float
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


@dataclass
class PrefillProgress:
    """Progress of a request's prefill.

    Args:
        cached_len: tokens in the cache before this request.
        load: cache load that must finish first.
        blocks: blocks to prefill before the last prompt token; `next_block` is the index of the
            next one.
        steps: for chat sessions instead, a generator that prefills one block per step;
            `estimated_blocks` is an estimate of those left, `seconds` the time spent so far.
        new_ids: the part of the prompt that a chat session's caches lack.
        prompt_tail: end of the prompt, read by the first decode step.
        passed_blocks: blocks given to other requests of the tenant since this one had one.
        scored_len: prompt tokens whose log-probabilities were sent.
        image_part: part of the prompt that is being read, if it has images.
    """

    cached_len: int = 0
    load: CacheLoad | None = None
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    next_block: int = 0
    steps: Generator[object, None, None] | None = None
    estimated_blocks: int = 0
    seconds: float = 0.0
    new_ids: tuple[int, ...] = ()
    prompt_tail: tuple[int, ...] = ()
    passed_blocks: int = 0
    scored_len: int = 0
    image_part: ImagePart | None = None

    @property
    def is_done(self) -> bool:
        """True if only the end of the prompt is left, which the first decode step reads."""
        return self.load is None and self.steps is None and self.next_block == len(self.blocks)

    @property
    def remaining_blocks(self) -> int:
        """Blocks left to prefill."""
        if self.steps is not None:
            return max(1, self.estimated_blocks)
        return len(self.blocks) - self.next_block

    @property
    def block(self) -> tuple[int, ...]:
        """Tokens of the next block."""
        return self.blocks[self.next_block]

    def resize_block(self, most: int) -> None:
        """Make the next block one of `most` tokens, with some of the block behind it or without
        some of its own; no other becomes longer than a block was.
        """
        count = 1 if len(self.block) > most else 2
        text = tuple(token for block in self.blocks[self.next_block :][:count] for token in block)
        parts = [part for part in (text[:most], text[most:]) if part]
        self.blocks[self.next_block : self.next_block + count] = parts


@dataclass
class AnswerProgress:
    """Progress of a request's answer.

    Args:
        stream, sampler: text and sampling of the answer; None until the prompt is read.
        output_ids: generated tokens.
        num_unread: generated tokens that the cache has not read; more than one behind tokens that a
            constraint forces.
        step_tokens: generated tokens that the next decode step reads.
        active_turn: the chat cache that answers.
        finish_reason: set once the answer has ended while `closing_ids`, the end of the turn, is
            yet to be read.
        completed_turn: the turn to store, if its end was read in separate steps; else the last
            decode step completes it.
        turn_commit: the chat state after the turn.
    """

    stream: AnswerText | None = None
    sampler: TokenSampler | None = None
    output_ids: list[int] = field(default_factory=list)
    num_unread: int = 1
    step_tokens: int = 1
    active_turn: ActiveTurn | None = None
    finish_reason: str = ""
    closing_ids: tuple[int, ...] = ()
    completed_turn: CompletedTurn | None = None
    turn_commit: TurnCommit | None = None


@dataclass(eq=False)
class RequestState(Ticket):
    """State of one request. All but `cancel` is for the model's thread.

    Args:
        resolved: the session that it continues, and its prompt.
        new_tokens: maximum number of generated tokens.
        wake: requests a step of the model's thread.
        backend: how the session holds its caches.
        matcher: parser of the request's constraint.
        contexts: tokens of contexts that are read apart; None without any.
        order: number by which it arrived.
        program_order: `order` of the first request of its program.
        passed: later requests of its tenant that left the queue before it.
        was_resident: the session's cache was in memory when the request was admitted.
        awaited_write: write of another cache that it waits for, or has waited for.
        num_preemptions: times that it gave up its memory to a request that comes first.
        was_new: the session was created for this request.
        durable: as in `Report`.
    """

    request: Request
    listener: Listener
    resolved: ResolvedSession
    new_tokens: int
    times: RequestTimes
    wake: Callable[[], None]
    backend: SessionBackend
    matcher: ConstraintMatcher | None = None
    contexts: ContextText | None = None
    counts: PromptTokenCounts = field(default_factory=PromptTokenCounts)
    prefill: PrefillProgress = field(default_factory=PrefillProgress)
    answer: AnswerProgress = field(default_factory=AnswerProgress)
    order: int = 0
    program_order: int = 0
    passed: int = 0
    was_resident: bool = False
    awaited_write: Future[SavedCache] | None = None
    num_preemptions: int = 0
    was_new: bool = False
    durable: bool | None = None
    is_cancelled: bool = False

    @property
    def session(self) -> SessionState:
        return self.resolved.session

    def cancel(self) -> None:
        self.is_cancelled = True
        self.wake()

    def usable_tokens(self, session: SessionState) -> int:
        """Tokens of the request that the cache of a session can be used for; 0 for an exact request
        if the cache is lossy.
        """
        if self.request.exact and not session.residency.is_lossless:
            return 0
        return session.usable_prefix_len(self.known_ids)

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Tokens of the prompt and of the answer so far."""
        return (*self.resolved.prompt_ids, *self.answer.output_ids)

    @property
    def can_be_preempted(self) -> bool:
        """True if it can release its memory and continue later.

        Not while its cache is loaded or its answer ends, and not without a session of its own.
        """
        is_ending = bool(self.answer.finish_reason) or self.answer.completed_turn is not None
        return not (is_ending or self.request.is_ephemeral or self.prefill.load is not None)

    @property
    def has_ended(self) -> bool:
        """True if the turn is complete and nothing is left to read."""
        return self.answer.completed_turn is not None and self.prefill.is_done

    @property
    def cache(self) -> SequenceCache:
        """The cache that answers."""
        cache = (
            self.session.residency.active
            if self.answer.active_turn is None
            else self.answer.active_turn.cache
        )
        assert cache is not None
        return cache

    @property
    def reads_prompt_tail(self) -> bool:
        """True if the next decode step reads a prompt tail, which may be as long as a block."""
        return not self.answer.output_ids and len(self.step_ids) > 1

    @property
    def step_ids(self) -> tuple[int, ...]:
        """Input tokens of the next decode step."""
        if self.answer.finish_reason:
            return self.answer.closing_ids
        output_ids, start = self.answer.output_ids, -self.answer.num_unread
        if output_ids:
            return tuple(output_ids[start:][: self.answer.step_tokens])
        return self.prefill.prompt_tail or (self.resolved.prompt_ids[-1],)

    @property
    def workflow_steps(self) -> float:
        """Workflow steps until the session is used again, as the request announced."""
        announced = self.request.steps
        return float(announced.get("", announced.get(self.session.name, math.inf)))

    @property
    def next_tool(self) -> str:
        """Tool that runs after the answer; empty if none is known."""
        assert self.answer.stream is not None
        return self.request.tool or self.request.answer_form.called_tool(self.answer.stream.text)

    @property
    def prompt(self) -> array:
        """Prompt tokens that this request adds to the transcript."""
        before = num_tokens(self.resolved.past_turns)
        return array(TOKEN_TYPECODE, self.resolved.prompt_ids[before:])

    def complete_turn(self, closing: Sequence[int], unread: int, reason: str) -> CompletedTurn:
        """The completed turn.

        Args:
            closing: tokens that end the answer's turn.
            unread: as `CompletedTurn.unread_tokens`.
        """
        assert self.answer.stream is not None
        answer = array(TOKEN_TYPECODE, [*self.answer.output_ids, *closing])
        return CompletedTurn(
            messages=self.resolved.new_messages,
            prompt_ids=self.prompt,
            text=self.request.answer_form.canonical(self.answer.stream.text),
            answer_ids=answer,
            unread_tokens=unread,
            params=GenerationParams.of(self.request),
            reason=reason,
        )

    def report(self, reason: str, now: float) -> Report:
        """Measurements of the request."""
        session, occupancy = self.session, self.session.residency.occupancy
        per_head = occupancy.entries // max(1, session.serving.heads)
        lost_entries = max(0, occupancy.read - per_head) if session.serving.is_limited else 0
        merges, times = session.serving.merges, self.times
        return Report(
            session=session.name,
            prompt_tokens=len(self.resolved.prompt_ids),
            cached_tokens=self.counts.cached,
            restored_tokens=self.counts.restored,
            recomputed_tokens=self.counts.recomputed,
            new_tokens=len(self.answer.output_ids),
            evicted_tokens=0 if merges else lost_entries,
            merged_tokens=lost_entries if merges else 0,
            lossless=session.residency.is_lossless
            and (self.contexts is None or session.serving.is_exact_with_contexts),
            tier=self.counts.tier,
            reason=reason,
            wait_seconds=(now if times.started is None else times.started) - times.arrived,
            first_seconds=(now if times.first is None else times.first) - times.arrived,
            seconds=now - times.arrived,
            durable=self.durable,
            matched_stop=None if self.answer.stream is None else self.answer.stream.matched_stop,
        )
