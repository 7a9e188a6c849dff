"""Offline eviction with knowledge of future reads: two rules, and an upper bound for any rule.

Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer" (1966), evicts what is
needed last; with different sizes that is no longer optimal, and the optimum is hard to compute. The
bound is a relaxation like that of Berger, Beckmann and Harchol-Balter, "Practical Bounds on Optimal
Caching with Variable Object Sizes" (2017), arXiv:1711.03709: each object cached from one use to the
next read takes its bytes for that time and has its savings, in fractions if necessary. Theirs lets
a tier use the bytes of idle hours in busy ones; here the time is cut into windows, each with a
price per byte, and for any prices the sum of

    bytes of the tier * prices + savings beyond their price, where positive

is an upper bound of the savings. Prices are adjusted to the demand until the sum is minimal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from larder.store import BoolColumn, CandidateColumns, EvictionPolicy, FloatColumn
from larder_bench.traces.base import NONE, CachedObject, ReadEvent, Trace, WriteEvent

WINDOWS, ROUNDS = 256, 150  # of the bound


@dataclass(frozen=True)
class FutureReads:
    """Times of the reads of each object in a trace.

    Args:
        times: times of the reads that need an object, by its id. Every read needs its system
            prompt, which remains if a state is not cached.
    """

    times: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(trace: Trace) -> FutureReads:
        times: list[list[float]] = [[] for _ in trace.objects]
        for read in trace.reads:
            for object_id in {
                *ancestor_chain(trace.objects, read.object_id),
                system_prompt_of(trace.objects, read.object_id),
            }:
                times[object_id].append(read.time)
        return FutureReads(tuple(map(tuple, times)))

    def after(self, object_id: int, now: float) -> float:
        """Time of the next read; infinite if there is none."""
        index = bisect_right(self.times[object_id], now)
        return self.times[object_id][index] if index < len(self.times[object_id]) else np.inf


class Belady(EvictionPolicy):
    """Belady's rule: evict the object with the latest next read. `steps` are the times of the next
    reads.
    """

    def worth(self, candidates: CandidateColumns, now: float) -> FloatColumn:
        return -candidates.steps


class Clairvoyant(EvictionPolicy):
    """Rule that evicts the object with the least savings per byte and second until its next
    read.
    """

    def worth(self, candidates: CandidateColumns, now: float) -> FloatColumn:
        savings_rate = candidates.seconds / candidates.bytes
        return savings_rate / np.maximum(candidates.steps - now, 1e-3)


@dataclass(frozen=True)
class ReuseIntervals:
    """Intervals from a use of an object to its next read, during which it can be cached; [N] each.

    System prompts are small and assumed to be always cached.

    Args:
        begins, ends: start and end times in seconds.
        bytes: cached bytes.
        tokens, seconds: savings of the read, beyond its system prompt.
        prompt_bytes: bytes of all system prompts.
        prompt_tokens, prompt_seconds: savings by system prompts.
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
        objects, rows = trace.objects, list(_reuse_intervals(trace))
        begins, ends, sizes, spared, saved = np.array(rows, np.float64).reshape(-1, 5).T
        size = sum(cached.bytes for cached in objects if cached.session == NONE)
        known = set[int]()
        tokens, seconds = 0, 0.0
        for read in trace.reads:
            if (prompt := system_prompt_of(objects, read.object_id)) in known:
                tokens += objects[prompt].tokens
                seconds += objects[prompt].seconds
            known.add(prompt)
        return ReuseIntervals(begins, ends, sizes, spared, saved, size, tokens, seconds)

    def needed_bytes(self) -> int:
        """Peak of the bytes of all intervals: a tier of this capacity never recomputes anything."""
        times = np.concatenate([self.begins, self.ends])
        changes = np.concatenate([self.bytes, -self.bytes])
        most = changes[np.lexsort((changes, times))].cumsum().max(initial=0.0)
        return int(most) + self.prompt_bytes

    def most_tokens(self, budget_bytes: int) -> float:
        """Upper bound of the prompt tokens that a tier of this capacity can save."""
        return self.prompt_tokens + self._most(self.tokens, budget_bytes)

    def most_seconds(self, budget_bytes: int) -> float:
        """Upper bound of the seconds that a tier of this capacity can save."""
        return self.prompt_seconds + self._most(self.seconds, budget_bytes)

    def _most(self, saved: FloatColumn, budget_bytes: int) -> float:
        times = np.concatenate([self.begins, self.ends])
        edges = np.unique(np.quantile(times, np.linspace(0, 1, WINDOWS + 1)))
        if len(edges) < 2:
            return float(saved.sum())
        lengths = np.diff(edges)
        prices = np.full(len(lengths), self._one_price(saved, budget_bytes * lengths.sum()))
        least = float(saved.sum())
        for index in range(ROUNDS):
            paid = np.concatenate([[0.0], (prices * lengths).cumsum()])
            span = np.interp(self.ends, edges, paid) - np.interp(self.begins, edges, paid)
            gains = saved - self.bytes * span
            least = min(least, float(gains[gains > 0].sum() + budget_bytes * paid[-1]))
            demand = self._demand(gains > 0, edges) / (budget_bytes * lengths)
            prices *= np.clip(demand, 0.2, 5.0) ** (0.5 / (1 + index / 15))
        return least

    def _one_price(self, saved: FloatColumn, capacity: float) -> float:
        """Price per byte and second if it is the same at all times: the savings rate of the last
        interval that fits.
        """
        costs = self.bytes * np.maximum(self.ends - self.begins, 1e-9)
        order = np.argsort(costs / saved, kind="stable")
        last = min(int(np.searchsorted(costs[order].cumsum(), capacity)), len(order) - 1)
        return float(saved[order[last]] / costs[order[last]])

    def _demand(self, chosen: BoolColumn, edges: FloatColumn) -> FloatColumn:
        """Byte-seconds of the chosen intervals in each window."""
        total = np.zeros(len(edges))
        for times, sign in ((self.begins, 1.0), (self.ends, -1.0)):
            moments, sizes = times[chosen], self.bytes[chosen]
            order = np.argsort(moments, kind="stable")
            count = np.searchsorted(moments[order], edges)
            size = np.concatenate([[0.0], sizes[order].cumsum()])[count]
            weighted = np.concatenate([[0.0], (sizes * moments)[order].cumsum()])[count]
            total += sign * (edges * size - weighted)
        return np.diff(total)


def ancestor_chain(objects: Sequence[CachedObject], object_id: int) -> Iterator[int]:
    """Ids of the objects that a read of an object needs: itself and all its parents."""
    while object_id != NONE:
        yield object_id
        object_id = objects[object_id].parent


def _reuse_intervals(trace: Trace) -> Iterator[tuple[float, float, int, int, float]]:
    """Intervals of sessions' own objects: start, end, bytes, saved tokens, saved seconds."""
    objects, used = trace.objects, dict[int, float]()
    for event in trace.events:
        if isinstance(event, WriteEvent):
            for object_id in ancestor_chain(objects, event.object_id):
                used.setdefault(object_id, event.time)
        elif isinstance(event, ReadEvent):
            for object_id in ancestor_chain(objects, event.object_id):
                if object_id in used and objects[object_id].session != NONE:
                    yield (
                        used[object_id],
                        event.time,
                        objects[object_id].bytes,
                        *_savings(objects, object_id),
                    )
                    used[object_id] = event.time


def _savings(objects: Sequence[CachedObject], number: int) -> tuple[int, float]:
    cached = objects[number]
    if cached.parent != NONE:
        return cached.tokens - objects[cached.parent].tokens, cached.seconds
    prompt = objects[system_prompt_of(objects, number)]
    return cached.tokens - prompt.tokens, cached.seconds - prompt.seconds


def system_prompt_of(objects: Sequence[CachedObject], object_id: int) -> int:
    while objects[object_id].before != NONE:
        object_id = objects[object_id].before
    return object_id
