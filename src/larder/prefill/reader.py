"""Reads tokens into caches and has the policy judge them: the step that all schedules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from larder.cache.sequence import SequenceCache
from larder.core.ledger import SURPRISE
from larder.core.observation import Prompts, ScratchPrompt
from larder.core.types import AppendKind, Mode
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment, Observer
from larder.policy.planner import Planner
from larder.prefill.eviction_pass import EvictionPass, ScoringPhase, record_surprise
from larder.prefill.memory import PeakMemoryMeter

# The latest tokens, read once more for who judges by how surprising tokens were.
REREAD_TOKENS = 32


def _keep_in_place(cache: SequenceCache) -> None:
    """The cache stays where it is."""
    del cache


@dataclass(frozen=True)
class PrefillSequence:
    """One cache being built.

    Args:
        book: the prompts that judge it.
        finish: takes the cache over once it is built.
    """

    cache: SequenceCache
    book: Prompts
    finish: Callable[[SequenceCache], None] = _keep_in_place


@dataclass(frozen=True)
class PrefillReader:
    """A model, a policy and a budget, ready to read.

    Args:
        tokens: M, entries per kv head averaged over the managed layers.
        quotas: the same per managed layer, by layer index.
        pages: entries per kv head that are left for recalled pages, once anything is parked.
    """

    decoder: Decoder
    planner: Planner
    tokens: int
    quotas: Mapping[int, int]
    meter: PeakMemoryMeter
    pages: int = 0

    def append(self, lanes: Sequence[PrefillSequence], ids: tuple[int, ...]) -> None:
        """Read tokens into every lane; nothing is judged."""
        rows, judge = self._appending(lanes, ids)
        if SURPRISE not in self.planner.ledger.columns:
            self.decoder.read(rows, Mode.APPEND, judge)
            return
        start = lanes[0].cache.next_position
        for row, surprises in zip(
            rows, self.decoder.forward_surprise(rows, Mode.APPEND, judge), strict=True
        ):
            for layer in self.quotas:
                record_surprise(row.cache, layer, start, surprises)

    def settle(
        self,
        lanes: Sequence[PrefillSequence],
        ids: tuple[int, ...],
        block: tuple[int, ...],
        start: int,
    ) -> None:
        """Read tokens into every lane, then bring each lane back within its budget.

        Args:
            ids: the tokens still to be read.
            block: the tokens to judge by; `ids` are its last ones.
            start: true position of the first token of `block`.
        """
        for _ in self.settling(lanes, ids, block, start):
            pass

    def settling(
        self,
        lanes: Sequence[PrefillSequence],
        ids: tuple[int, ...],
        block: tuple[int, ...],
        start: int,
    ) -> Iterator[None]:
        """As `settle`, with a pause before every further pass."""
        if self._fits(lanes, len(ids)):
            self.append(lanes, ids)
            return
        scratches = [self._scratches(lane, block, start) for lane in lanes]
        caches = [lane.cache for lane in lanes]
        length = start + len(block)
        judge = self._judge(caches, length)
        if not scratches[0]:
            judge.expect(
                [ScratchPrompt(ids, (0, length))] * len(lanes),
                [ScoringPhase.DECIDE] * len(lanes),
                0,
            )
            self.decoder.read(_rows(caches, ids), Mode.APPEND, judge, self.planner.needs)
            return
        rounds, following = list(zip(*scratches, strict=True)), list[int]()
        if any(scratch.drafts for scratch in scratches[0]):
            rows, watching = self._appending(lanes, ids)
            following = greedy_tokens(self.decoder, rows, Mode.APPEND, watching)
        else:
            self.append(lanes, ids)
        for number, prompts in enumerate(rounds, start=1):
            yield
            turn = ScoringPhase.DECIDE if number == len(rounds) else ScoringPhase.ACCUMULATE
            asked = with_drafts(self.decoder, caches, prompts, following)
            behind = sum(scratch.tokens for scratch in asked)
            judge.expect(asked, [turn] * len(asked), behind)
            pairs = zip(caches, asked, strict=True)
            rows = [BatchSegment(cache, each.ids, shift=each.shift) for cache, each in pairs]
            self.decoder.read(rows, Mode.SCRATCH, judge, self.planner.needs)

    def finish(self, lane: PrefillSequence, waiting: Sequence[PrefillSequence] = ()) -> None:
        """A lane has read everything: give its slack back and hand the cache over.

        Args:
            waiting: lanes beside it that are finished later.
        """
        # Giving back and handing over go layer by layer, and hold one layer twice.
        caches = [lane.cache, *(each.cache for each in waiting)]
        self.meter.note(caches, lane.cache.largest_layer_bytes)
        lane.cache.compact()
        self.meter.park(lane.cache)
        lane.finish(lane.cache)

    def _appending(
        self, lanes: Sequence[PrefillSequence], ids: tuple[int, ...]
    ) -> tuple[list[BatchSegment], EvictionPass]:
        """Rows that every lane reads, and who watches them without judging."""
        caches = [lane.cache for lane in lanes]
        judge = self._judge(caches, lanes[0].cache.next_position + len(ids))
        judge.expect(
            [ScratchPrompt(ids, (0, 0))] * len(lanes), [ScoringPhase.OBSERVE] * len(lanes), 0
        )
        return _rows(caches, ids), judge

    def _scratches(
        self, lane: PrefillSequence, block: tuple[int, ...], start: int
    ) -> tuple[ScratchPrompt, ...]:
        """What is read behind a lane to judge it.

        How surprising tokens are is known only once they have passed, when all layers have gone by.
        """
        scratches = self.planner.scorer.scratch(block, start, lane.book)
        if scratches or SURPRISE not in self.planner.ledger.columns:
            return scratches
        return (ScratchPrompt(block[-REREAD_TOKENS:], (0, start + len(block))),)

    def _judge(self, caches: Sequence[SequenceCache], length: int) -> EvictionPass:
        lengths, quotas = [length] * len(caches), [self.quotas] * len(caches)
        return EvictionPass(self.planner, caches, self.tokens, quotas, self.meter, lengths)

    def _fits(self, lanes: Sequence[PrefillSequence], new_tokens: int) -> bool:
        """Whether every layer of every lane stays within its budget without any plan.

        What has all been kept so far parks nothing, and needs no room for pages.
        """
        longest = max(lane.cache.next_position for lane in lanes) + new_tokens
        spec, finest = self.decoder.spec, self.planner.storage.finest
        return all(
            longest <= finest(quota, spec.layers[index], spec.dtype.itemsize) + self.pages
            for index, quota in self.quotas.items()
        )


def _rows(caches: Sequence[SequenceCache], ids: tuple[int, ...]) -> list[BatchSegment]:
    """The same text for every cache."""
    return [BatchSegment(cache, ids, append_kind=AppendKind.TEXT) for cache in caches]


def greedy_tokens(
    decoder: Decoder, rows: Sequence[BatchSegment], mode: Mode, observer: Observer | None = None
) -> list[int]:
    """Read rows, and tell the likeliest token behind each."""
    ends = [total - 1 for total in accumulate(len(row.ids) for row in rows)]
    return decoder.forward_logits(rows, mode, ends, observer).argmax(-1).tolist()


def with_drafts(
    decoder: Decoder,
    caches: Sequence[SequenceCache],
    asked: Sequence[ScratchPrompt],
    following: Sequence[int],
) -> list[ScratchPrompt]:
    """Scratch prompts with their drafts behind them, as many for each.

    The caches stay as they are, so a draft is read anew for each token that is added to it.

    Args:
        following: the likeliest token right behind each cache, for prompts without tokens.
    """
    for _ in range(asked[0].drafts):
        said = following
        if asked[0].ids:
            pairs = zip(caches, asked, strict=True)
            rows = [BatchSegment(cache, each.ids, shift=each.shift) for cache, each in pairs]
            said = greedy_tokens(decoder, rows, Mode.SCRATCH)
        longer = [(*each.ids, token) for each, token in zip(asked, said, strict=True)]
        pairs = zip(asked, longer, strict=True)
        asked = [replace(each, ids=ids, drafts=each.drafts - 1) for each, ids in pairs]
    return list(asked)
