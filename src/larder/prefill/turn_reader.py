"""Turn reader: reads a turn of a conversation into a cache of at most budget + block entries.

A message is read in blocks, as a context is. Generated tokens accumulate until a block is full. The
end of a block brings the cache back to its budget, and so does the end of the turn: the tokens of
the block are truncated and read again in one pass, in which the policy scores, so that a turn
leaves the cache that a context in the same blocks would leave. Policies that evict at every decode
step need no second pass.

    budget    [ kept entries                      ]
    running   [ kept entries                      | open block ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from larder.cache.recurrent_state import CacheCheckpoint
from larder.cache.sequence import SequenceCache
from larder.core.observation import Prompts
from larder.core.types import AppendKind, Mode, TokenIds
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder
from larder.models.observers import Observer
from larder.prefill.base import Steps, TurnRule, run_steps, split_blocks
from larder.prefill.memory import EntryCapacity, PeakMemoryMeter
from larder.prefill.reader import PrefillReader, PrefillSequence

if TYPE_CHECKING:  # few policies evict while text is generated
    from larder.prefill.decode_eviction import DecodeEviction

REPLAYED_TOKENS = 16  # most tokens of an answer that one pass reads, where it may read several

# Makes the reader of a text of a given length, which measures peaks with a meter.
ReaderFactory = Callable[[int, PeakMemoryMeter], PrefillReader]


@dataclass(frozen=True)
class OpenBlock:
    """Last tokens of a cache, those since the last plan, and the cache before them."""

    ids: tuple[int, ...]
    start: CacheCheckpoint


class TurnReader:
    """One turn over one cache, for one thread.

    `snapshot` is the cache before the turn, once truncation can no longer undo the turn; None until
    then.

    Args:
        cache: cache that the turn extends.
        prompts: scratch prompts by name.
        reader_of: makes the reader that reads a block with a plan.
        bound: capacity of the cache; None where nothing is ever evicted.
        block: most tokens of one pass.
        open_block: last tokens of the cache, those since the last plan.
        eviction: eviction at every decode step; None where plans are made at the end of blocks.
        snapshot: an existing copy of the cache before the turn.
        turns: what the end of the turn changes.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: SequenceCache,
        prompts: Prompts,
        reader_of: ReaderFactory,
        bound: EntryCapacity | None,
        block: int,
        open_block: OpenBlock,
        eviction: DecodeEviction | None = None,
        snapshot: SequenceCache | None = None,
        turns: TurnRule = TurnRule(),  # noqa: B008, without state
    ) -> None:
        self.cache, self.snapshot, self.meter = cache, snapshot, PeakMemoryMeter()
        self._decoder, self._sequence, self._reader_of = (
            decoder,
            PrefillSequence(cache, prompts),
            reader_of,
        )
        self._bound, self._block, self._eviction = bound, block, eviction
        self._turns = turns
        self._final_eviction = None if eviction is None else eviction.at_turn_end()
        self._open, self._start = list(open_block.ids), open_block.start
        self._last_pass = cache.checkpoint()

    @property
    def open_block(self) -> OpenBlock:
        """Last tokens of the cache, those since the last plan."""
        return OpenBlock(tuple(self._open), self._start)

    @property
    def free_tokens(self) -> int:
        """Tokens that the next pass may read; 0 where the block must end first."""
        if self._bound is None:
            return self._block
        if self._eviction is not None:
            return min(self._block, self._bound.free_tokens(self.cache))
        return self._block - len(self._open)

    @property
    def step_tokens(self) -> int:
        """Most generated tokens that one pass may read with the result of a pass for each."""
        recalls = any(tier.has_offloaded for tier in self.cache.tiers)
        if self._eviction is not None or recalls:
            return 1
        return min(self.free_tokens or self._block, REPLAYED_TOKENS)

    def reserve(self, tokens: int) -> None:
        """Reserve storage for a turn of `tokens` tokens, limited to what can accumulate."""
        if self._bound is not None:
            tokens = 1 if self._eviction is not None else min(tokens, self._block)
        self.cache.reserve(tokens)

    def message_steps(self, ids: TokenIds) -> Steps[tuple[int, ...]]:
        """Read a message except its last part, which the next pass may read; returns that part."""
        if self._eviction is None:
            *blocks, ids = split_blocks(ids, self._block)
            for block in blocks:
                yield from self._block_end(block)
                yield
        while len(ids) > self.free_tokens:
            count = max(1, self.free_tokens)
            self._read(ids[:count], AppendKind.QUESTION, 0, self._eviction)
            ids = ids[count:]
            yield
        return ids

    def read_last_part(self, ids: TokenIds) -> None:
        """Read the last part of a message whose answer is replayed."""
        self._read(ids, AppendKind.QUESTION, 0, self._eviction)

    def end_block_steps(self, tokens: int) -> Steps[None]:
        """End the open block if it has no space for `tokens` more tokens."""
        if self._eviction is None and self.free_tokens < tokens:
            yield from self._block_end()

    def closing_steps(self, ids: TokenIds, answer_tokens: int) -> Steps[None]:
        """Read the closing tokens of a turn, which were not generated.

        Args:
            answer_tokens: tokens of the answer.
        """
        while ids:
            yield from self.end_block_steps(1)
            count = max(1, self.free_tokens)
            self._read(ids[:count], AppendKind.TEXT, answer_tokens, self._final_eviction)
            ids = ids[count:]
            yield

    def replay_steps(self, ids: TokenIds) -> Steps[None]:
        """Read an answer again with the same result as its generation, in fewer passes where
        possible.
        """
        recalls = any(tier.has_offloaded for tier in self.cache.tiers)
        is_single = self._eviction is not None or recalls
        most, index = 1 if is_single else REPLAYED_TOKENS, 0
        while index < len(ids):
            yield from self.end_block_steps(1)
            part = ids[index : index + min(most, self.free_tokens)]
            index += len(part)
            kind = AppendKind.STEP if is_single else AppendKind.TEXT
            self._read(part, kind, index, self._eviction)
            if not is_single or index % REPLAYED_TOKENS == 0:
                yield

    def end_turn_steps(self) -> Steps[None]:
        """End the turn: bring the cache back to its budget."""
        if self._eviction is None:
            is_judged = self._is_turn_judged()
            if is_judged or self._needs_plan(0):
                yield from self._read_with_plans(self._truncate_open_block())
            if is_judged:
                self._turns.freeze(self.cache)
            self._open = []
        elif self.is_over_budget:  # the turn had no closing pass: read its last token again
            last = tuple(self._open[self._last_pass.position - self._start.position :])
            self.cache.roll_back(self._last_pass)
            self._read(last, AppendKind.TEXT, 0, self._final_eviction)
        self.meter.observe([self.cache], 0)

    def is_within_after(self, tokens: int) -> bool:
        """True if the cache is within its budget after the next pass reads `tokens` tokens."""
        if self._turns.plans_turns and self._bound is not None:
            return False
        if self._eviction is None:
            return tokens <= self.free_tokens and not self._needs_plan(tokens)
        return 0 < tokens <= self.free_tokens if tokens else not self.is_over_budget

    @property
    def is_over_budget(self) -> bool:
        """True if the cache exceeds its capacity between two turns."""
        if self._bound is None:
            return False
        return self._bound.is_exceeded(self.cache)

    def observer(
        self, numbers: Sequence[int], segments: Sequence[BatchSegment], steps: Sequence[int]
    ) -> Observer | None:
        """Observer of a pass over the only segment; ends the open block first where it is full.

        It has the signature of `larder.engine.generate.ObserverFactory`.
        """
        run_steps(self.end_block_steps(len(segments[0].ids)))
        return self._observer(segments[0], steps[0], self._eviction)

    def last_observer(self, segment: BatchSegment, answer_tokens: int) -> Observer | None:
        """Observer of the last pass of a turn, after which the cache is within its budget."""
        return self._observer(segment, answer_tokens, self._final_eviction)

    def _observer(
        self, segment: BatchSegment, answer_tokens: int, eviction: DecodeEviction | None
    ) -> Observer | None:
        """Observer of a pass, whose tokens join the open block."""
        self.meter.observe([self.cache], 0)
        self._last_pass = self.cache.checkpoint()
        # Tokens of a failed pass.
        del self._open[self._last_pass.position - self._start.position :]
        self._open.extend(segment.ids)
        return None if eviction is None else eviction.observer([0], [segment], [answer_tokens])

    def _read(
        self, ids: TokenIds, kind: AppendKind, answer_tokens: int, eviction: DecodeEviction | None
    ) -> None:
        segment = BatchSegment(self.cache, ids, append_kind=kind)
        self._decoder.read([segment], Mode.APPEND, self._observer(segment, answer_tokens, eviction))

    def _block_end(self, more: tuple[int, ...] = ()) -> Steps[None]:
        """End a block within the turn, after reading `more` tokens of it."""
        if self._needs_plan(len(more)):
            ids = (*self._truncate_open_block(), *more)
            if self.snapshot is None:
                self.snapshot = self.cache.fork()
                self.meter.parked_bytes += self.snapshot.nbytes
            yield from self._read_with_plans(ids)
        else:
            if more:
                self._read(more, AppendKind.QUESTION, 0, None)
            self._close()

    def _needs_plan(self, more: int) -> bool:
        """True if a block that ends after `more` tokens needs a plan."""
        if self._bound is None or not (self._open or more):
            return False
        planner = self._reader_of(self.cache.next_position + more, self.meter).planner
        return planner.has_state or self._bound.is_exceeded(self.cache, more)

    def _is_turn_judged(self) -> bool:
        """True if the end of the turn needs a plan whatever the cache holds."""
        if not self._turns.plans_turns or self._bound is None or not self._open:
            return False
        length = self.cache.next_position
        return self._turns.is_due(self._reader_of(length, self.meter), self.cache, length)

    def _truncate_open_block(self) -> tuple[int, ...]:
        """Truncate the open block; returns its tokens."""
        ids = tuple(self._open)
        self.cache.roll_back(self._start)
        return ids

    def _read_with_plans(self, ids: TokenIds) -> Steps[None]:
        """Read tokens as blocks of a context, with a plan per block."""
        cache = self.cache
        reader = self._reader_of(cache.next_position + len(ids), self.meter)
        for block in split_blocks(ids, self._block):
            block_reader = self._turns.reader(reader, cache, cache.next_position + len(block))
            start = cache.next_position
            yield from block_reader.read_and_evict_steps([self._sequence], block, block, start)
        self._turns.trim(cache, self._bound)
        self._close()

    def _close(self) -> None:
        self._open, self._start = [], self.cache.checkpoint()
