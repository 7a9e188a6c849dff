"""Prefill turn by turn, in which no entry is judged twice (FlowKV).

Liu et al., "FlowKV: Enhancing Multi-Turn Conversational Coherence in LLMs via Isolated Key-Value
Cache Management" (2025), arXiv:2505.15347: while a turn runs, its question and its answer are held
whole. When it ends, the rest of the policy judges the entries born in it, and what it leaves is
never judged again: repeated cuts would leave half of a half of the first turns. The system prompt
is a part of its own. Every part keeps the same share, so a cache grows with the conversation.

Inferred: the share. Left open, it is what the budget is of the text that is read, or a half where
there is no text. A part whose share would not hold what is protected of it is judged together with
the next. A text that is no conversation may fill the budget, as under `whole()`. Beyond the budget
the oldest judged entries leave, first positions first, but for the sinks of `protect`; a budget
above what the conversation will need avoids that. A turn longer than a block is judged at the end
of its blocks, too, where the budget has no room for all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter
from larder.core.types import TokenIds
from larder.prefill.base import Schedule, Steps, TurnRule
from larder.prefill.memory import EntryCapacity, resident_entries
from larder.prefill.reader import PrefillGroup, PrefillReader, PrefillSequence
from larder.prefill.schedules.whole import read_then_plan

DEFAULT_SHARE = 0.5  # of a turn, where no text is there to compare the budget with


@dataclass(frozen=True)
class Freeze(Schedule):
    """Prefill with one plan per turn, over the entries of that turn.

    Args:
        kept: share of the tokens of a turn that stays, in (0, 1]; left open, the share that the
            budget is of the text that is read, or a half.
    """

    kept: float | None = None

    def __post_init__(self) -> None:
        if self.kept is not None and not 0 < self.kept <= 1:
            raise BadParameter(f"freeze.kept must be a share in (0, 1], got {self.kept}.")

    def with_budget(self, tokens: int, context: int | None) -> Freeze:
        if self.kept is not None:
            return self
        return replace(self, kept=min(1.0, tokens / context) if context else DEFAULT_SHARE)

    @property
    def turn_rule(self) -> Freezing:
        return Freezing(DEFAULT_SHARE if self.kept is None else self.kept)

    def steps(self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds) -> Steps[None]:
        total = len(ids) * len(sequences)
        for index, sequence in enumerate(sequences):
            yield from self._sequence_steps(reader, sequence, ids)
            reader.finish(sequence)
            yield len(ids) * (index + 1), total

    def _sequence_steps(
        self, reader: PrefillReader, sequence: PrefillSequence, ids: TokenIds
    ) -> Steps[None]:
        cache, rule = sequence.cache, self.turn_rule.protecting(reader.planner.protect.sinks)
        if not sequence.turn_ends:  # no conversation, or a part of a turn: it may fill the budget
            frozen = [_frozen_entries(cache, layer) for layer in reader.quotas]
            rule = replace(rule, room=reader.tokens - sum(frozen) // max(1, len(frozen)))
        start, stop = cache.next_position, cache.next_position + len(ids)
        ends = [end for end in sorted(set(sequence.turn_ends)) if start < end < stop]
        edges = self._joined(reader, [start, *ends, stop])
        for first, end in pairwise(edges):
            sequence_reader = rule.reader(reader, cache, end)
            yield from read_then_plan(sequence_reader, sequence, ids[first - start : end - start])
            rule.trim(cache, reader.bound)
            if end in sequence.turn_ends:
                rule.freeze(cache)
            yield None

    def _joined(self, reader: PrefillReader, edges: list[int]) -> list[int]:
        """Edges of turns, without those whose turn is too short to be judged alone."""
        least = reader.planner.smallest_budget(reader.tokens)
        kept, joined = self.turn_rule.kept, edges[:1]
        for edge in edges[1:]:
            if int(kept * (edge - joined[-1])) > least or edge == edges[-1]:
                joined.append(edge)
        is_short = len(joined) > 2 and int(kept * (joined[-1] - joined[-2])) <= least
        return [*joined[:-2], joined[-1]] if is_short else joined


@dataclass(frozen=True)
class Freezing(TurnRule):
    """Rule by which entries are judged once, when their turn ends.

        entries    [ frozen, of turns that ended | of the running turn ]
        positions  0                             watermark             next_position

    Args:
        kept: share of a turn's tokens that stays, in (0, 1].
        first: first tokens of the text that never leave.
        room: entries per kv head that the running turn has in any case.
    """

    kept: float
    first: int = 0
    room: int = 0

    plans_turns = True

    def protecting(self, first: int) -> Freezing:
        return replace(self, first=first)

    def share(self, reader: PrefillReader, tokens: int) -> int:
        """Entries per kv head that a turn of so many tokens leaves: its share, what is protected
        of it, and never more than the whole budget.
        """
        least = reader.planner.smallest_budget(reader.tokens)
        return min(tokens, reader.tokens, max(least, self.room, int(self.kept * tokens)))

    def is_due(self, reader: PrefillReader, cache: SequenceCache, length: int) -> bool:
        """True if the share of the tokens above the watermark holds what is protected of them.

        Shorter turns stay whole, and are judged together with the next.
        """
        least = reader.planner.smallest_budget(reader.tokens)
        return int(self.kept * (length - cache.watermark)) > least

    def reader(self, reader: PrefillReader, cache: SequenceCache, length: int) -> PrefillReader:
        if not reader.quotas:  # nothing is ever evicted
            return reader
        tokens = self.share(reader, length - cache.watermark)
        total, layers = sum(reader.quotas.values()), len(reader.quotas)
        quotas = {
            layer: _frozen_entries(cache, layer) + quota * tokens * layers // total
            for layer, quota in reader.quotas.items()
        }
        planner = replace(reader.planner, watermark=cache.watermark)
        return replace(reader, planner=planner, tokens=tokens, quotas=quotas)

    def freeze(self, cache: SequenceCache) -> None:
        cache.watermark = cache.next_position

    def trim(self, cache: SequenceCache, bound: EntryCapacity | None) -> None:
        """Drop the oldest frozen entries beyond the bound, position by position in all heads."""
        excess = 0 if bound is None else resident_entries(cache) - bound.entries
        if excess <= 0:
            return
        layers = [layer for layer in cache.spec.managed if cache.is_budgeted(layer)]
        held = torch.cat([cache.entries(layer.index).packed_positions() for layer in layers])
        old = held[(held >= self.first) & (held < cache.watermark)].sort().values
        if len(old):
            cache.drop_range(self.first, int(old[min(excess, len(old)) - 1]) + 1)


def _frozen_entries(cache: SequenceCache, layer: int) -> int:
    """Entries per kv head of a layer below the watermark."""
    entries = cache.entries(layer)
    frozen = int((entries.packed_positions() < cache.watermark).sum())
    return frozen // max(1, len(entries.lengths))


Part = Freeze
