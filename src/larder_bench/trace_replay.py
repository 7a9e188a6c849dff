"""Replays a trace on a tier of so many bytes, and counts what its rule of eviction saves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from larder.store.eviction.base import (
    NUM_QUANTILES,
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

PAUSES_PER_TOOL = 64  # pauses of each tool
MIN_PAUSES = 8  # pauses that are told as they were; before that they are guessed from their mean


@dataclass
class ReplayCounts:
    """Result of a replay.

    Args:
        prompt_tokens, prompt_seconds: of all that was to be read.
        hit_tokens, hit_bytes, hit_seconds: of that, what was held.
        known_tokens, known_seconds: of that, what a tier without end would have held.
        hits: reads that found the very state that they wanted.
        evictions, evicted_bytes: of what had to leave.
        written_bytes: of all that came.
        refused: pieces that are larger than the tier.
        peak_bytes: the most that was held.
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
class ToolPauses:
    """Durations of tool calls, and the prediction of the next."""

    seen: dict[str, deque[float]] = field(default_factory=dict[str, deque[float]])
    told: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    def saw(self, tool: str, seconds: float) -> None:
        self.seen.setdefault(tool, deque(maxlen=PAUSES_PER_TOOL)).append(seconds)
        self.told.pop(tool, None)

    def after(self, tool: str) -> np.ndarray:
        """Quantiles of a pause; of a tool that is new those of an exponential draw [QUANTILES]."""
        if tool not in self.told:
            self.told[tool] = self._guess(self.seen.get(tool, ()))
        return self.told[tool]

    def _guess(self, seen: Sequence[float] | deque[float]) -> np.ndarray:
        if not seen:
            return np.full(NUM_QUANTILES, np.inf)
        if len(seen) >= MIN_PAUSES:
            return pause_quantiles(list(seen))
        middles = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        return -np.log1p(-middles) * float(np.mean(seen))


class SimulatedTier(ReplayTier):
    """A tier that holds pieces of a trace, and never more bytes than it has.

    Args:
        rule: who leaves when something comes that finds no room.
        foresight: tells the rule, as `steps`, when each is read next; hints and pins go unheard.
    """

    def __init__(
        self,
        trace: Trace,
        rule: EvictionPolicy,
        budget_bytes: int,
        foresight: FutureReads | None = None,
    ) -> None:
        self.counts = ReplayCounts()
        self._trace, self._rule, self._budget = trace, rule, budget_bytes
        self._pieces, self._foresight = trace.pieces, foresight
        self._rows: dict[int, int] = {}  # of what is held, by piece
        self._columns = CandidateColumns.empty(256)
        self._used = 0
        self._clock = 0.0
        self._pauses = ToolPauses()
        self._waits: dict[int, tuple[str, float]] = {}  # what a session waits for, and since when
        self._states: dict[int, int] = {}  # the last of each session
        self._found: dict[int, int] = {}  # tokens that its last read found
        self._written = set[int]()

    def read(self, event: ReadEvent) -> None:
        if waited := self._waits.pop(event.session, None):
            self._pauses.saw(waited[0], event.time - waited[1])
        held = self._nearest(event.piece)
        hit = self._pieces[held].tokens if held != NONE else 0
        self._found[event.session] = hit
        self._count(event, held, hit)
        piece = held
        while piece != NONE:
            self._touch(piece, event.time)
            piece = self._pieces[piece].parent

    def write(self, event: WriteEvent) -> None:
        self._waits[event.session] = (event.tool, event.time)
        self._states[event.session] = event.piece
        for piece in self._missing(event):
            self._written.add(piece)
            if not self._put(piece, event.time):
                return
        self._set_pauses(event)
        if (old := self._rows.get(self._pieces[event.piece].replaces)) is not None:
            self._columns.superseded[old] = True

    def hint(self, event: HintEvent) -> None:
        if self._foresight is not None:
            return
        piece = self._states.get(event.session, NONE)
        while piece != NONE:
            self._set_steps(piece, event.steps)
            piece = self._pieces[piece].before

    def pin(self, event: PinEvent) -> None:
        if self._foresight is not None:
            return
        piece = self._states.get(event.session, NONE)
        while piece != NONE:
            if (row := self._rows.get(piece)) is not None:
                self._columns.pinned_until[row] = event.until
            piece = self._pieces[piece].parent

    def _set_pauses(self, event: WriteEvent) -> None:
        """All that the session has waits for the same."""
        piece = event.piece
        rows = list[int]()
        while piece != NONE and self._pieces[piece].session != NONE:
            rows.append(self._rows[piece])
            piece = self._pieces[piece].parent
        self._columns.pauses[rows] = self._pauses.after(event.tool)

    def _set_steps(self, piece: int, steps: float) -> None:
        if (row := self._rows.get(piece)) is None:
            return
        is_shared = self._pieces[piece].session == NONE  # somebody else is next, mostly
        self._columns.steps[row] = 1.0 if is_shared else steps

    def _nearest(self, piece: int) -> int:
        """Longest cached prefix of a text."""
        while piece != NONE and piece not in self._rows:
            piece = self._pieces[piece].before
        return piece

    def _count(self, event: ReadEvent, held: int, hit: int) -> None:
        counts, known = self.counts, event.piece
        if self._pieces[known].session == NONE and known not in self._written:
            known = NONE
        counts.reads += 1
        counts.hits += held == event.piece
        counts.prompt_tokens += event.tokens
        counts.prompt_seconds += self._trace.seconds_of(event.tokens)
        counts.hit_tokens += hit
        counts.hit_seconds += self._trace.seconds_of(hit)
        if known != NONE:
            counts.known_tokens += self._pieces[known].tokens
            counts.known_seconds += self._trace.seconds_of(self._pieces[known].tokens)
        while held != NONE:
            counts.hit_bytes += self._pieces[held].bytes
            held = self._pieces[held].parent

    def _touch(self, piece: int, now: float) -> None:
        columns, row = self._columns, self._rows[piece]
        columns.last_used[row] = now
        columns.uses[row] += 1
        columns.clock[row] = self._clock
        if self._foresight is not None:
            columns.steps[row] = self._foresight.after(piece, now)

    def _missing(self, event: WriteEvent) -> list[int]:
        """Objects that a turn adds and the tier lacks, in text order."""
        missing, piece, found = list[int](), event.piece, self._found.get(event.session, 0)
        while piece != NONE:
            told = self._pieces[piece]
            is_left = piece == event.piece or told.parent != NONE or told.session == NONE
            if is_left and piece not in self._rows and told.tokens > found:
                missing.append(piece)
            piece = told.before
        return missing[::-1]

    def _put(self, piece: int, now: float) -> bool:
        """Hold a piece, if there is room for it at all."""
        told, parent = self._pieces[piece], self._rows.get(self._pieces[piece].parent)
        if told.parent != NONE and parent is None:
            return False
        next_read = np.inf if self._foresight is None else self._foresight.after(piece, now)
        if told.bytes > self._budget:
            self.counts.refused += 1
            return False
        if self._foresight is not None and np.isinf(next_read):
            return False
        if parent is not None:
            self._columns.children[parent] += 1  # so that it stays
        if not self._make_room(told.bytes, now):
            self._columns.children[self._rows[told.parent]] -= 1
            self.counts.refused += 1
            return False
        self._insert(piece, now, next_read)
        self._used += told.bytes
        self.counts.written_bytes += told.bytes
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._used)
        return True

    def _insert(self, piece: int, now: float, steps: float) -> None:
        row, columns, told = len(self._rows), self._columns, self._pieces[piece]
        if row == len(columns):
            columns = self._columns = _doubled_capacity(columns)
        self._rows[piece] = row
        columns.codes[row], columns.bytes[row] = piece, told.bytes
        columns.seconds[row], columns.last_used[row] = told.seconds, now
        columns.uses[row], columns.clock[row] = 1, self._clock
        columns.sessions[row], columns.superseded[row] = told.session, False
        columns.pinned_until[row], columns.steps[row] = -np.inf, steps
        columns.pauses[row], columns.parents[row] = np.inf, told.parent
        columns.children[row] = 0

    def _make_room(self, wanted_bytes: int, now: float) -> bool:
        lacking = self._used + wanted_bytes - self._budget
        if lacking <= 0:
            return True
        held = self._columns.first(len(self._rows))
        leaving = self._rule.select_victims(held, now, lacking)
        self._clock = max(self._clock, leaving.clock)
        for piece in held.codes[list(leaving.rows)].tolist():
            self._drop(piece)
        return self._used + wanted_bytes <= self._budget

    def _drop(self, piece: int) -> None:
        told, columns = self._pieces[piece], self._columns
        row, last = self._rows.pop(piece), len(self._rows)
        if row != last:
            columns.move(last, row)
            self._rows[int(columns.codes[row])] = row
        if (parent := self._rows.get(told.parent)) is not None:
            columns.children[parent] -= 1
        if (old := self._rows.get(told.replaces)) is not None:
            columns.superseded[old] = False
        self._used -= told.bytes
        self.counts.evictions += 1
        self.counts.evicted_bytes += told.bytes


def replay_trace(
    trace: Trace, rule: EvictionPolicy, budget_bytes: int, foresight: FutureReads | None = None
) -> ReplayCounts:
    """Savings of a tier of a capacity over a whole trace."""
    shelf = SimulatedTier(trace, rule, budget_bytes, foresight)
    for event in trace.events:
        event.play(shelf)
    return shelf.counts


def best_rule(
    trace: Trace, rules: Sequence[EvictionPolicy], budget_bytes: int, share: float = 0.1
) -> Any:
    """The rule that saves most seconds over the first part of a trace; of equals the first."""
    head = replace(trace, events=trace.events[: max(1, int(share * len(trace.events)))])
    return max(rules, key=lambda rule: replay_trace(head, rule, budget_bytes).hit_seconds)


def _doubled_capacity(columns: CandidateColumns) -> CandidateColumns:
    return CandidateColumns(
        **{name: np.concatenate([column, column]) for name, column in vars(columns).items()}
    )
