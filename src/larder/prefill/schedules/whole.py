"""Prefill of the whole context before one plan: the schedule of SnapKV, KVzip and most methods.

The whole cache is in memory before anything is evicted, so the budget binds only afterwards; the
peak is measured and reported. Reading goes by large blocks without a plan in between, which is
exact. No paper of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.types import TokenIds
from larder.prefill.base import Schedule, Steps
from larder.prefill.reader import PrefillGroup, PrefillReader, PrefillSequence

# Bounds activations; without a plan in between, blocks of any size give the same cache. The last
# block is longer where a scorer observes more tokens, and is the whole text where it
# observes all of it.
BLOCK_TOKENS = 1024


@dataclass(frozen=True)
class Whole(Schedule):
    """Prefill with one plan, after all tokens are read."""

    def steps(self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds) -> Steps[None]:
        total = len(ids) * len(sequences)
        for index, sequence in enumerate(sequences):
            yield from read_then_plan(reader, sequence, ids)
            reader.finish(sequence)
            yield len(ids) * (index + 1), total


def read_then_plan(reader: PrefillReader, sequence: PrefillSequence, ids: TokenIds) -> Steps[None]:
    """Read tokens into one sequence, in large blocks, with one plan behind them."""
    start = sequence.cache.next_position
    scorer = reader.planner.scorer
    observed = max(BLOCK_TOKENS, scorer.protected_tokens().last)  # these always stay
    last = 0 if reader.planner.observes_whole_text else max(0, len(ids) - observed)
    sequence.cache.allocate(len(ids))
    images = sequence.images.within(start, start + len(ids))
    first, last = 0, images.border(last, 0)
    if last == len(ids):  # the image ends the text
        last = 0
    while first < last:
        cut = images.border(min(first + BLOCK_TOKENS, last), first)
        reader.append((sequence,), ids[first:cut])
        first = cut
        yield None
    yield from reader.read_and_evict_steps((sequence,), ids[last:], ids, start)


Part = Whole
