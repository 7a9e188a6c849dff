"""Reads a turn of a conversation into a cache that holds no more than budget + block meanwhile.

A message is read in blocks, as a context is. Tokens that are generated pile up until a block is
full. The end of a block brings the cache back to its budget, and so does the end of the turn: the
tokens of the block are taken back and read once more in one pass, in which the policy judges, so
that a turn leaves what a context in the same blocks would leave. Policies that act at every step
of generation need no second pass: they judge as tokens come.

    budget    [ what was kept                     ]
    running   [ what was kept                     | open block ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from larder.cache.sequence import SequenceCache
from larder.core.ledger import SURPRISE
from larder.core.observation import Prompts
from larder.core.types import AppendKind, Mode
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment, Observer
from larder.prefill.base import Steps, run_steps, split_blocks
from larder.prefill.decode_eviction import DecodeEviction
from larder.prefill.memory import EntryCapacity, PeakMemoryMeter
from larder.prefill.reader import PrefillReader, PrefillSequence

REPLAYED_TOKENS = 16  # of an answer that one pass reads once more

# What reads a text that will be so many tokens long, and counts peaks with this meter.
ReaderFactory = Callable[[int, PeakMemoryMeter], PrefillReader]


class TurnReader:
    """One turn over one cache, for one thread.

    `saved` is the cache as it was before the turn, from the moment on that the turn can no longer
    be cut off it; None until then.

    Args:
        cache: what the turn continues.
        book: the prompts that judge it.
        bound: what it may hold; None where nothing is ever dropped.
        block: the most tokens that one pass reads.
        tending: what keeps the cache within its budget at every step; None where a block piles up.
        saved: a copy that is there already.
        open_ids: the last tokens that the cache has read, if no plan has judged them yet.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: SequenceCache,
        book: Prompts,
        reader_of: ReaderFactory,
        bound: EntryCapacity | None,
        block: int,
        tending: DecodeEviction | None = None,
        saved: SequenceCache | None = None,
        open_ids: Sequence[int] = (),
    ) -> None:
        self.cache, self.saved, self.meter = cache, saved, PeakMemoryMeter()
        self._decoder, self._lane, self._reader_of = (
            decoder,
            PrefillSequence(cache, book),
            reader_of,
        )
        self._bound, self._block, self._tending = bound, block, tending
        self._resting = None if tending is None else tending.resting()
        self._open, self._start = list(open_ids), cache.next_position - len(open_ids)

    @property
    def open_ids(self) -> tuple[int, ...]:
        """The last tokens that the cache has read, if no plan has judged them yet."""
        return tuple(self._open)

    @property
    def room(self) -> int:
        """Tokens that the next pass may read; 0 where a block has to end first."""
        if self._bound is None:
            return self._block
        if self._tending is not None:
            return min(self._block, self._bound.room(self.cache))
        return self._block - len(self._open)

    def reserve(self, tokens: int) -> None:
        """Set storage aside for a turn of so many tokens, or for what of it may pile up."""
        if self._bound is not None:
            tokens = 1 if self._tending is not None else min(tokens, self._block)
        self.cache.reserve(tokens)

    def reading(self, ids: tuple[int, ...]) -> Steps[tuple[int, ...]]:
        """Read a message but for its last part, which the next pass may read; returns that."""
        if self._tending is None:
            *blocks, ids = split_blocks(ids, self._block)
            for block in blocks:
                yield from self._block_end(block)
                yield
        while len(ids) > self.room:
            count = max(1, self.room)
            self._read(ids[:count], AppendKind.QUESTION, 0, self._tending)
            ids = ids[count:]
            yield
        return ids

    def ask(self, ids: tuple[int, ...]) -> None:
        """Read the last part of a message that was answered before."""
        self._read(ids, AppendKind.QUESTION, 0, self._tending)

    def end_block_steps(self, tokens: int) -> Steps[None]:
        """End the open block where so many more tokens would not fit behind it."""
        if self._tending is None and self.room < tokens:
            yield from self._block_end()

    def following(self, ids: tuple[int, ...], said: int) -> Steps[None]:
        """Read the end of the turn, which was not generated.

        Args:
            said: tokens of the answer.
        """
        while ids:
            yield from self.end_block_steps(1)
            count = max(1, self.room)
            self._read(ids[:count], AppendKind.TEXT, said, self._resting)
            ids = ids[count:]
            yield

    def replay_steps(self, ids: tuple[int, ...]) -> Steps[None]:
        """Read an answer as it was read when it was generated, in fewer passes where that is the
        same."""
        recalls = any(tier.has_offloaded for tier in self.cache.tiers)
        is_single = self._tending is not None or recalls
        most, place = 1 if is_single else REPLAYED_TOKENS, 0
        while place < len(ids):
            yield from self.end_block_steps(1)
            part = ids[place : place + min(most, self.room)]
            place += len(part)
            coming = AppendKind.STEP if is_single else AppendKind.TEXT
            self._read(part, coming, place, self._tending)
            if not is_single or place % REPLAYED_TOKENS == 0:
                yield

    def settling(self) -> Steps[None]:
        """The end of the turn: bring the cache back to its budget."""
        if self._tending is None:
            if self._is_judged(0):
                yield from self._judging(self._taken_back())
            self._open = []
        elif self.is_over:  # no pass was left at the end of the turn: its last token has one more
            last = tuple(self._open[-1:])
            self.cache.truncate(self.cache.next_position - len(last))
            self._read(last, AppendKind.TEXT, 0, self._resting)
        self.meter.note([self.cache], 0)

    def is_within_after(self, tokens: int) -> bool:
        """Whether the cache is within its budget once the next pass has read so many tokens."""
        if self._tending is None:
            return tokens <= self.room and not self._is_judged(tokens)
        return 0 < tokens <= self.room if tokens else not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the cache holds more than it may between two turns."""
        if self._bound is None:
            return False
        return self._bound.is_over(self.cache)

    def observer(
        self, numbers: Sequence[int], rows: Sequence[BatchSegment], steps: Sequence[int]
    ) -> Observer | None:
        """As `larder.engine.generate.ObserverFactory`, of the only row: makes room for a pass
        first.
        """
        del numbers
        run_steps(self.end_block_steps(len(rows[0].ids)))
        return self._observer(rows[0], steps[0], self._tending)

    def last_observer(self, row: BatchSegment, said: int) -> Observer | None:
        """As `tend`, of the pass behind which the cache rests."""
        return self._observer(row, said, self._resting)

    def _observer(
        self, row: BatchSegment, said: int, tending: DecodeEviction | None
    ) -> Observer | None:
        """Who watches a pass, whose tokens are open from now on."""
        self.meter.note([self.cache], 0)
        del self._open[self.cache.next_position - self._start :]  # of a pass that has failed
        self._open.extend(row.ids)
        return None if tending is None else tending.observer([0], [row], [said])

    def _read(
        self, ids: tuple[int, ...], coming: AppendKind, said: int, tending: DecodeEviction | None
    ) -> None:
        row = BatchSegment(self.cache, ids, append_kind=coming)
        self._decoder.read([row], Mode.APPEND, self._observer(row, said, tending))

    def _block_end(self, more: tuple[int, ...] = ()) -> Steps[None]:
        """The end of a block within the turn, for which more of it may have to be read."""
        if self._is_judged(len(more)):
            ids = (*self._taken_back(), *more)
            if self.saved is None:
                self.saved = self.cache.fork()
                self.meter.parked_bytes += self.saved.nbytes
            yield from self._judging(ids)
        else:
            if more:
                self._read(more, AppendKind.QUESTION, 0, None)
            self._close()

    def _is_judged(self, more: int) -> bool:
        """Whether the policy looks at a block that ends after so many more tokens."""
        if self._bound is None or not (self._open or more):
            return False
        planner = self._reader_of(self.cache.next_position + more, self.meter).planner
        is_counted = planner.counts or SURPRISE in planner.ledger.columns
        return is_counted or self._bound.is_over(self.cache, more)

    def _taken_back(self) -> tuple[int, ...]:
        """Forget the open block; its tokens."""
        ids = self.open_ids
        self.cache.truncate(self._start)
        return ids

    def _judging(self, ids: tuple[int, ...]) -> Steps[None]:
        """Read tokens as blocks of a context."""
        cache = self.cache
        reader = self._reader_of(cache.next_position + len(ids), self.meter)
        for block in split_blocks(ids, self._block):
            yield from reader.settling([self._lane], block, block, cache.next_position)
        self._close()

    def _close(self) -> None:
        self._open, self._start = [], self.cache.next_position
