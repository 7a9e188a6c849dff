"""A request on its way: what it has still to read, and what it has said."""

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
    """Seconds of one clock; None for what has not been yet."""

    asked: float
    started: float | None = None
    first: float | None = None


@dataclass
class PromptTokenCounts:
    """Tokens of the prompt by where they came from."""

    cached: int = 0
    restored: int = 0
    recomputed: int = 0
    tier: str = "none"


@dataclass(frozen=True)
class CacheLoad:
    """A cache on its way from the store.

    Args:
        source: whose it is: the session's own, or that of one whose text begins alike.
        usable: how many of its tokens the text begins with.
        room: host memory that it needs on its way.
    """

    source: SessionState
    kept: SavedCache
    usable: int
    room: Reservation
    future: Future[LoadedCaches]


@dataclass(eq=False)
class RequestState(Ticket):
    """One answer in the making. All but `cancel` is for the model's thread.

    Args:
        said: the finished exchanges that the text begins with.
        turns: the messages behind them.
        wanted: every token in front of the answer.
        new_tokens: the most that are generated.
        wake: tells the model's thread that something has changed.
        manner: how its session is held.
        mark: tokens that the cache had read before.
        pieces: what must be read before the last token of the prompt, block by block.
        fetch: what must arrive before that.
        was_new: whether the session was made for it.
        course: reads what must be read before the answer, a block at a time, where the session is
            held as a chat; `ahead` are the blocks that it has left, roughly, and `seconds` is what
            it took so far.
        active_turn: the cache of a chat that answers.
        new_ids: the part of the text that such a request adds to the caches of its session.
        asked: the end of the prompt, which the first pass of the answer reads.
        ended: why the answer has ended, where `tail`, the end of the turn, is yet to be read.
        completed_turn: the turn as it is to be kept, where the end of it was read apart; else the
            pass that reads its last token finishes it.
        turn_commit: the chat behind the turn.
        passed_blocks: blocks that others of its tenant have got since it had one.
        durable: as in `Report`.
    """

    request: Request
    listener: Listener
    sitting: SessionState
    said: tuple[CompletedTurn, ...]
    turns: tuple[ChatMessage, ...]
    wanted: tuple[int, ...]
    new_tokens: int
    times: RequestTimes
    wake: Callable[[], None]
    manner: SessionBackend
    counts: PromptTokenCounts = field(default_factory=PromptTokenCounts)
    mark: int = 0
    pieces: list[tuple[int, ...]] = field(default_factory=list)
    place: int = 0
    course: Generator[object, None, None] | None = None
    ahead: int = 0
    seconds: float = 0.0
    active_turn: ActiveTurn | None = None
    new_ids: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    ended: str = ""
    tail: tuple[int, ...] = ()
    completed_turn: CompletedTurn | None = None
    turn_commit: TurnCommit | None = None
    stream: IncrementalDetokenizer | None = None
    source: torch.Generator | None = None
    ids: list[int] = field(default_factory=list)
    fetch: CacheLoad | None = None
    was_new: bool = False
    passed_blocks: int = 0
    durable: bool | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.wake()

    @property
    def is_prefilled(self) -> bool:
        """Whether only the end of the prompt is left to be read, by the pass that answers."""
        return self.fetch is None and self.course is None and self.place == len(self.pieces)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to be read, not even by a pass that answers."""
        return self.completed_turn is not None and self.is_prefilled

    @property
    def left(self) -> int:
        """Blocks to be read before that."""
        return max(1, self.ahead) if self.course is not None else len(self.pieces) - self.place

    @property
    def cache(self) -> SequenceCache:
        """What answers."""
        cache = self.sitting.cache if self.active_turn is None else self.active_turn.cache
        assert cache is not None
        return cache

    @property
    def reads_prompt_tail(self) -> bool:
        """Whether the next pass reads the end of a prompt that may be as long as a block."""
        return not self.ids and len(self.unread) > 1

    @property
    def unread(self) -> tuple[int, ...]:
        """What the next pass reads: what was said last by anybody."""
        if self.ended:
            return self.tail
        return (self.ids[-1],) if self.ids else self.asked or (self.wanted[-1],)

    @property
    def steps(self) -> float:
        """Of a workflow until the session is asked again, as the request says."""
        said = self.request.steps
        return float(said.get("", said.get(self.sitting.name, math.inf)))

    @property
    def prompt(self) -> array:
        """The part of the text that this request has added."""
        before = sum(each.tokens for each in self.said)
        return array(TOKEN_TYPECODE, self.wanted[before:])

    def exchange(self, closing: Sequence[int], unread: int, reason: str) -> CompletedTurn:
        """It as a finished exchange.

        Args:
            closing: what ends the answer's turn.
            unread: as in `CompletedTurn`.
        """
        assert self.stream is not None
        answer = array(TOKEN_TYPECODE, [*self.ids, *closing])
        told = self.turns, self.prompt, self.stream.text.strip(), answer, unread
        return CompletedTurn(*told, GenerationParams.of(self.request), reason)

    def report(self, reason: str, now: float) -> Report:
        """What it took."""
        sitting, held = self.sitting, self.sitting.held
        per_head = held.entries // max(1, sitting.rule.heads)
        gone = max(0, held.read - per_head) if sitting.rule.is_limited else 0
        merges, times = sitting.rule.merges, self.times
        return Report(
            session=sitting.name,
            prompt_tokens=len(self.wanted),
            cached_tokens=self.counts.cached,
            restored_tokens=self.counts.restored,
            recomputed_tokens=self.counts.recomputed,
            new_tokens=len(self.ids),
            evicted_tokens=0 if merges else gone,
            merged_tokens=gone if merges else 0,
            lossless=sitting.is_lossless,
            tier=self.counts.tier,
            reason=reason,
            wait_seconds=(now if times.started is None else times.started) - times.asked,
            first_seconds=(now if times.first is None else times.first) - times.asked,
            seconds=now - times.asked,
            durable=self.durable,
        )
