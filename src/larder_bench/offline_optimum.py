"""Offline eviction with knowledge of future reads: two rules, and an upper bound for any rule.

Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer" (1966), lets go what is
needed last; where sizes differ that is no longer the best, and the best is hard to find. The bound
is a relaxation in the manner of Berger, Beckmann and Harchol-Balter, "Practical Bounds on Optimal
Caching with Variable Object Sizes" (2017), arXiv:1711.03709: whatever is held from one use to the
next read takes its bytes for that time and saves what it saves, in fractions if need be. Theirs
lets a tier spend the bytes of quiet hours in busy ones; here the time is cut into windows, each
with a price for its bytes, and whatever prices there are, the sum of

    bytes of the tier * prices + what is saved beyond its price, where that is more than 0

is never less than what can be saved. Prices follow the demand until the sum is as low as it gets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from larder.store.eviction.base import BoolColumn, CandidateColumns, EvictionPolicy, FloatColumn
from larder_bench.traces.base import NONE, CachedObject, ReadEvent, Trace, WriteEvent

WINDOWS, ROUNDS = 256, 150  # of the bound


@dataclass(frozen=True)
class FutureReads:
    """When each piece is read in a trace.

    Args:
        times: of the reads that want it, by piece. A system prompt is wanted by every read, as it
            is what remains of a state that is not held.
    """

    times: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(trace: Trace) -> FutureReads:
        times: list[list[float]] = [[] for _ in trace.pieces]
        for read in trace.reads:
            for piece in {
                *ancestor_chain(trace.pieces, read.piece),
                system_prompt_of(trace.pieces, read.piece),
            }:
                times[piece].append(read.time)
        return FutureReads(tuple(map(tuple, times)))

    def after(self, piece: int, now: float) -> float:
        """When it is read next; infinite if never."""
        place = bisect_right(self.times[piece], now)
        return self.times[piece][place] if place < len(self.times[piece]) else np.inf


class Belady(EvictionPolicy):
    """Belady's rule: evict the latest next read. `steps` are the times of the next reads."""

    def worth(self, held: CandidateColumns, now: float) -> FloatColumn:
        del now
        return -held.steps


class Clairvoyant(EvictionPolicy):
    """What saves least per byte and second until its next read goes first."""

    def worth(self, held: CandidateColumns, now: float) -> FloatColumn:
        return held.seconds / (held.bytes * np.maximum(held.steps - now, 1e-3))


@dataclass(frozen=True)
class ReuseIntervals:
    """All times for which something could be held, from one use to the next read; [N] each.

    System prompts are small and taken to be there always.

    Args:
        begins, ends: seconds.
        bytes: that are held.
        tokens, seconds: that the read is spared, beyond its system prompt.
        prompt_bytes: of all system prompts.
        prompt_tokens, prompt_seconds: that reads are spared by them.
    """

    begins: FloatColumn
    ends: FloatColumn
    bytes: FloatColumn
    tokens: FloatColumn
    seconds: FloatColumn
    prompt_bytes: int
    prompt_tokens: int
    prompt_seconds: float

    @staticmethod
    def of(trace: Trace) -> ReuseIntervals:
        pieces, rows = trace.pieces, list(_reuse_intervals(trace))
        begins, ends, sizes, spared, saved = np.array(rows, np.float64).reshape(-1, 5).T
        size = sum(piece.bytes for piece in pieces if piece.session == NONE)
        known = set[int]()
        tokens, seconds = 0, 0.0
        for read in trace.reads:
            if (prompt := system_prompt_of(pieces, read.piece)) in known:
                tokens += pieces[prompt].tokens
                seconds += pieces[prompt].seconds
            known.add(prompt)
        return ReuseIntervals(begins, ends, sizes, spared, saved, size, tokens, seconds)

    def needed_bytes(self) -> int:
        """The most at any time: a tier that large never computes again what it could know."""
        times = np.concatenate([self.begins, self.ends])
        changes = np.concatenate([self.bytes, -self.bytes])
        most = changes[np.lexsort((changes, times))].cumsum().max(initial=0.0)
        return int(most) + self.prompt_bytes

    def most_tokens(self, budget_bytes: int) -> float:
        """The most tokens of prompts that a tier of so many bytes can spare."""
        return self.prompt_tokens + self._most(self.tokens, budget_bytes)

    def most_seconds(self, budget_bytes: int) -> float:
        """The most seconds."""
        return self.prompt_seconds + self._most(self.seconds, budget_bytes)

    def _most(self, saved: FloatColumn, budget_bytes: int) -> float:
        times = np.concatenate([self.begins, self.ends])
        edges = np.unique(np.quantile(times, np.linspace(0, 1, WINDOWS + 1)))
        if len(edges) < 2:
            return float(saved.sum())
        lengths = np.diff(edges)
        prices = np.full(len(lengths), self._one_price(saved, budget_bytes * lengths.sum()))
        least = float(saved.sum())
        for number in range(ROUNDS):
            paid = np.concatenate([[0.0], (prices * lengths).cumsum()])
            span = np.interp(self.ends, edges, paid) - np.interp(self.begins, edges, paid)
            gains = saved - self.bytes * span
            least = min(least, float(gains[gains > 0].sum() + budget_bytes * paid[-1]))
            demand = self._taken(gains > 0, edges) / (budget_bytes * lengths)
            prices *= np.clip(demand, 0.2, 5.0) ** (0.5 / (1 + number / 15))
        return least

    def _one_price(self, saved: FloatColumn, room: float) -> float:
        """Of a byte and second, if all times have the same: what the last that fits saves."""
        taken = self.bytes * np.maximum(self.ends - self.begins, 1e-9)
        order = np.argsort(taken / saved, kind="stable")
        last = min(int(np.searchsorted(taken[order].cumsum(), room)), len(order) - 1)
        return float(saved[order[last]] / taken[order[last]])

    def _taken(self, chosen: BoolColumn, edges: FloatColumn) -> FloatColumn:
        """Bytes times seconds that some of them take in each window."""
        total = np.zeros(len(edges))
        for times, sign in ((self.begins, 1.0), (self.ends, -1.0)):
            own, sizes = times[chosen], self.bytes[chosen]
            order = np.argsort(own, kind="stable")
            count = np.searchsorted(own[order], edges)
            size = np.concatenate([[0.0], sizes[order].cumsum()])[count]
            moment = np.concatenate([[0.0], (sizes * own)[order].cumsum()])[count]
            total += sign * (edges * size - moment)
        return np.diff(total)


def ancestor_chain(pieces: Sequence[CachedObject], piece: int) -> Iterator[int]:
    """What a read of a piece needs: it and all that it continues."""
    while piece != NONE:
        yield piece
        piece = pieces[piece].parent


def _reuse_intervals(trace: Trace) -> Iterator[tuple[float, float, int, int, float]]:
    """From each use of a session's own to the next read."""
    pieces, used = trace.pieces, dict[int, float]()
    for event in trace.events:
        if isinstance(event, WriteEvent):
            for piece in ancestor_chain(pieces, event.piece):
                used.setdefault(piece, event.time)
        elif isinstance(event, ReadEvent):
            for piece in ancestor_chain(pieces, event.piece):
                if piece in used and pieces[piece].session != NONE:
                    yield used[piece], event.time, pieces[piece].bytes, *_savings(pieces, piece)
                    used[piece] = event.time


def _savings(pieces: Sequence[CachedObject], number: int) -> tuple[int, float]:
    piece = pieces[number]
    if piece.parent != NONE:
        return piece.tokens - pieces[piece.parent].tokens, piece.seconds
    prompt = pieces[system_prompt_of(pieces, number)]
    return piece.tokens - prompt.tokens, piece.seconds - prompt.seconds


def system_prompt_of(pieces: Sequence[CachedObject], piece: int) -> int:
    while pieces[piece].before != NONE:
        piece = pieces[piece].before
    return piece
