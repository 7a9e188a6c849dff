"""Replay of traces on a simulated tier, with counts of what its eviction policy saves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from larder.store import (
    NUM_QUANTILES,
    QUANTILE_SHARES,
    CandidateColumns,
    EvictionPolicy,
    pause_quantiles,
)
from larder_bench.offline_optimum import FutureReads
from larder_bench.traces.base import (
    NONE,
    HintEvent,
    PinEvent,
    ReadEvent,
    ReplayTier,
    Trace,
    WriteEvent,
)

PAUSES_PER_TOOL = 64  # stored pauses of each tool
MIN_PAUSES = 8  # pauses needed for empirical quantiles; with fewer the mean is used


@dataclass
class ReplayCounts:
    """Result of a replay.

    Args:
        prompt_tokens, prompt_seconds: total of all reads.
        hit_tokens, hit_bytes, hit_seconds: part of it that was cached.
        known_tokens, known_seconds: part of it that an unlimited tier would have cached.
        hits: number of reads that found exactly their state.
        evictions, evicted_bytes: evicted objects.
        written_bytes: bytes of all written objects.
        refused: number of objects that did not fit into the tier.
        peak_bytes: maximum of the cached bytes.
    """

    reads: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    known_tokens: int = 0
    hit_bytes: int = 0
    prompt_seconds: float = 0.0
    hit_seconds: float = 0.0
    known_seconds: float = 0.0
    evictions: int = 0
    evicted_bytes: int = 0
    written_bytes: int = 0
    refused: int = 0
    peak_bytes: int = 0


@dataclass
class ToolDurations:
    """Durations of tool calls, and the prediction of the next."""

    pauses: dict[str, deque[float]] = field(default_factory=dict[str, deque[float]])
    quantiles: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    def record(self, tool: str, seconds: float) -> None:
        """Add the pause of a tool call."""
        self.pauses.setdefault(tool, deque(maxlen=PAUSES_PER_TOOL)).append(seconds)
        self.quantiles.pop(tool, None)

    def after(self, tool: str) -> np.ndarray:
        """Quantiles of a tool's pause; with few pauses those of an exponential distribution
        [QUANTILES].
        """
        if tool not in self.quantiles:
            self.quantiles[tool] = self._predict(self.pauses.get(tool, ()))
        return self.quantiles[tool]

    def _predict(self, pauses: Sequence[float] | deque[float]) -> np.ndarray:
        if not pauses:
            return np.full(NUM_QUANTILES, np.inf)
        if len(pauses) >= MIN_PAUSES:
            return pause_quantiles(list(pauses))
        middles = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        return -np.log1p(-middles) * float(np.mean(pauses))


class SimulatedTier(ReplayTier):
    """Tier that holds objects of a trace within a capacity in bytes.

    Args:
        policy: eviction policy.
        foresight: gives the policy the time of the next read of each object, as `steps`; hints and
            pins are ignored then.
    """

    def __init__(
        self,
        trace: Trace,
        policy: EvictionPolicy,
        budget_bytes: int,
        foresight: FutureReads | None = None,
    ) -> None:
        self.counts = ReplayCounts()
        self._trace, self._policy, self._budget = trace, policy, budget_bytes
        self._objects, self._foresight = trace.objects, foresight
        self._rows: dict[int, int] = {}  # rows of cached objects, by object id
        self._columns = CandidateColumns.empty(256)
        self._used = 0
        self._clock = 0.0
        self._pauses = ToolDurations()
        self._waits: dict[
            int, tuple[str, float]
        ] = {}  # tool that a session waits for, and since when
        self._states: dict[int, int] = {}  # last state of each session
        self._found: dict[int, int] = {}  # cached tokens of each session's last read
        self._written = set[int]()

    def read(self, event: ReadEvent) -> None:
        if waited := self._waits.pop(event.session, None):
            self._pauses.record(waited[0], event.time - waited[1])
        held = self._nearest(event.object_id)
        hit = self._objects[held].tokens if held != NONE else 0
        self._found[event.session] = hit
        self._count(event, held, hit)
        object_id = held
        while object_id != NONE:
            self._touch(object_id, event.time)
            object_id = self._objects[object_id].parent

    def write(self, event: WriteEvent) -> None:
        self._waits[event.session] = (event.tool, event.time)
        self._states[event.session] = event.object_id
        for object_id in self._missing(event):
            self._written.add(object_id)
            if not self._put(object_id, event.time):
                return
        self._set_pauses(event)
        if (old := self._rows.get(self._objects[event.object_id].replaces)) is not None:
            self._columns.superseded[old] = True

    def hint(self, event: HintEvent) -> None:
        if self._foresight is not None:
            return
        object_id = self._states.get(event.session, NONE)
        while object_id != NONE:
            self._set_steps(object_id, event.steps)
            object_id = self._objects[object_id].before

    def pin(self, event: PinEvent) -> None:
        if self._foresight is not None:
            return
        object_id = self._states.get(event.session, NONE)
        while object_id != NONE:
            if (row := self._rows.get(object_id)) is not None:
                self._columns.pinned_until[row] = event.until
            object_id = self._objects[object_id].parent

    def _set_pauses(self, event: WriteEvent) -> None:
        """Set the pause quantiles of all objects of a session."""
        object_id = event.object_id
        rows = list[int]()
        while object_id != NONE and self._objects[object_id].session != NONE:
            rows.append(self._rows[object_id])
            object_id = self._objects[object_id].parent
        self._columns.pauses[rows] = self._pauses.after(event.tool)

    def _set_steps(self, object_id: int, steps: float) -> None:
        if (row := self._rows.get(object_id)) is None:
            return
        is_shared = self._objects[object_id].session == NONE  # mostly another session is next
        self._columns.steps[row] = 1.0 if is_shared else steps

    def _nearest(self, object_id: int) -> int:
        """Id of the longest cached prefix of an object."""
        while object_id != NONE and object_id not in self._rows:
            object_id = self._objects[object_id].before
        return object_id

    def _count(self, event: ReadEvent, held: int, hit: int) -> None:
        counts, known = self.counts, event.object_id
        if self._objects[known].session == NONE and known not in self._written:
            known = NONE
        counts.reads += 1
        counts.hits += held == event.object_id
        counts.prompt_tokens += event.tokens
        counts.prompt_seconds += self._trace.seconds_of(event.tokens)
        counts.hit_tokens += hit
        counts.hit_seconds += self._trace.seconds_of(hit)
        if known != NONE:
            counts.known_tokens += self._objects[known].tokens
            counts.known_seconds += self._trace.seconds_of(self._objects[known].tokens)
        while held != NONE:
            counts.hit_bytes += self._objects[held].bytes
            held = self._objects[held].parent

    def _touch(self, object_id: int, now: float) -> None:
        columns, row = self._columns, self._rows[object_id]
        columns.last_used[row] = now
        columns.uses[row] += 1
        columns.clock[row] = self._clock
        if self._foresight is not None:
            columns.steps[row] = self._foresight.after(object_id, now)

    def _missing(self, event: WriteEvent) -> list[int]:
        """Ids of objects that a turn adds and the tier lacks, in text order."""
        missing, object_id, found = list[int](), event.object_id, self._found.get(event.session, 0)
        while object_id != NONE:
            cached = self._objects[object_id]
            is_kept = (
                object_id == event.object_id or cached.parent != NONE or cached.session == NONE
            )
            if is_kept and object_id not in self._rows and cached.tokens > found:
                missing.append(object_id)
            object_id = cached.before
        return missing[::-1]

    def _put(self, object_id: int, now: float) -> bool:
        """Cache an object if it fits at all; return whether it is cached."""
        cached, parent = self._objects[object_id], self._rows.get(self._objects[object_id].parent)
        if cached.parent != NONE and parent is None:
            return False
        next_read = np.inf if self._foresight is None else self._foresight.after(object_id, now)
        if cached.bytes > self._budget:
            self.counts.refused += 1
            return False
        if self._foresight is not None and np.isinf(next_read):
            return False
        if parent is not None:
            self._columns.children[parent] += 1  # so that it is not evicted
        if not self._make_room(cached.bytes, now):
            self._columns.children[self._rows[cached.parent]] -= 1
            self.counts.refused += 1
            return False
        self._insert(object_id, now, next_read)
        self._used += cached.bytes
        self.counts.written_bytes += cached.bytes
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._used)
        return True

    def _insert(self, object_id: int, now: float, steps: float) -> None:
        row, columns, cached = len(self._rows), self._columns, self._objects[object_id]
        if row == len(columns):
            columns = self._columns = _doubled_capacity(columns)
        self._rows[object_id] = row
        columns.codes[row], columns.bytes[row] = object_id, cached.bytes
        columns.seconds[row], columns.last_used[row] = cached.seconds, now
        columns.uses[row], columns.clock[row] = 1, self._clock
        columns.sessions[row], columns.superseded[row] = cached.session, False
        columns.pinned_until[row], columns.steps[row] = -np.inf, steps
        columns.pauses[row], columns.parents[row] = np.inf, cached.parent
        columns.pause_shares[row], columns.wait_seconds[row] = QUANTILE_SHARES, 0.0
        columns.children[row] = 0

    def _make_room(self, wanted_bytes: int, now: float) -> bool:
        lacking = self._used + wanted_bytes - self._budget
        if lacking <= 0:
            return True
        held = self._columns.first(len(self._rows))
        victims = self._policy.select_victims(held, now, lacking)
        self._clock = max(self._clock, victims.clock)
        for object_id in held.codes[list(victims.rows)].tolist():
            self._drop(object_id)
        return self._used + wanted_bytes <= self._budget

    def _drop(self, object_id: int) -> None:
        cached, columns = self._objects[object_id], self._columns
        row, last = self._rows.pop(object_id), len(self._rows)
        if row != last:
            columns.move(last, row)
            self._rows[int(columns.codes[row])] = row
        if (parent := self._rows.get(cached.parent)) is not None:
            columns.children[parent] -= 1
        if (old := self._rows.get(cached.replaces)) is not None:
            columns.superseded[old] = False
        self._used -= cached.bytes
        self.counts.evictions += 1
        self.counts.evicted_bytes += cached.bytes


def replay_trace(
    trace: Trace, policy: EvictionPolicy, budget_bytes: int, foresight: FutureReads | None = None
) -> ReplayCounts:
    """Savings of a tier with a capacity over a whole trace."""
    tier = SimulatedTier(trace, policy, budget_bytes, foresight)
    for event in trace.events:
        event.play(tier)
    return tier.counts


def best_policy(
    trace: Trace, policies: Sequence[EvictionPolicy], budget_bytes: int, share: float = 0.1
) -> Any:
    """Policy that saves most seconds on the first part of a trace; of equal ones the first."""
    head = replace(trace, events=trace.events[: max(1, int(share * len(trace.events)))])
    return max(policies, key=lambda policy: replay_trace(head, policy, budget_bytes).hit_seconds)


def _doubled_capacity(columns: CandidateColumns) -> CandidateColumns:
    return CandidateColumns(
        **{name: np.concatenate([column, column]) for name, column in vars(columns).items()}
    )
