"""Writes down what sessions do, and makes a trace of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from larder.models.kv_cost import KVSource
from larder_bench.traces.base import (
    NONE,
    CachedObject,
    HintEvent,
    PinEvent,
    ReadEvent,
    StateForm,
    Trace,
    TraceEvent,
    Workload,
    WriteEvent,
    prefill_seconds,
)

TOKENS_PER_SECOND = 50.0  # of an answer, as people and tools wait for it


@dataclass
class TraceSession:
    """Where a session stands.

    Args:
        states: its pieces so far, the system prompt first; tokens of the last are all it has.
    """

    number: int
    states: list[int]


@dataclass
class TraceBuilder:
    """Sessions of one crowd, written down in the order in which they begin."""

    crowd: Workload
    pieces: list[CachedObject] = field(default_factory=list[CachedObject])
    events: list[TraceEvent] = field(default_factory=list[TraceEvent])
    sessions: int = 0
    past: int = 0  # events before the last session began
    coming: list[float] = field(default_factory=list[float])  # times of the others, as a heap

    def holds(self, events: int, until: float) -> bool:
        """Whether so many events lie before a time at which the next session begins."""
        while self.coming and self.coming[0] <= until:
            heappop(self.coming)
            self.past += 1
        return self.past >= events

    def prompt(self, tokens: int) -> int:
        """A system prompt that sessions can begin with."""
        return self._add(NONE, tokens, NONE, NONE)

    def begin(self, prompt: int) -> TraceSession:
        self.sessions += 1
        return TraceSession(self.sessions - 1, [prompt])

    def turn(self, session: TraceSession, time: float, asked: int, said: int, tool: str) -> float:
        """A turn, and when it is over.

        Args:
            asked, said: tokens that come, and that the model says.
            tool: what the session waits for then.
        """
        last = session.states[-1]
        tokens = self.pieces[last].tokens + asked
        self._note(ReadEvent(time, session.number, last, tokens))
        over = time + said / TOKENS_PER_SECOND
        newest = NONE if len(session.states) == 1 else last
        session.states.append(self._add(session.number, tokens + said, last, newest))
        self._note(WriteEvent(over, session.number, session.states[-1], tool))
        return over

    def again(self, session: TraceSession, time: float, asked: int, said: int, tool: str) -> float:
        """The last turn once more, said otherwise: from the state before it on."""
        refused = session.states.pop()
        before = session.states[-1]
        tokens = self.pieces[before].tokens + asked
        self._note(ReadEvent(time, session.number, before, tokens))
        over = time + said / TOKENS_PER_SECOND
        session.states.append(self._add(session.number, tokens + said, before, refused, True))
        self._note(WriteEvent(over, session.number, session.states[-1], tool))
        return over

    def hint(self, session: TraceSession, time: float, steps: float) -> None:
        self._note(HintEvent(time, session.number, steps))

    def pin(self, session: TraceSession, time: float, until: float) -> None:
        self._note(PinEvent(time, session.number, until))

    def trace(self, events: int) -> Trace:
        """What was written down, in order of time, of which the first events."""
        ordered = sorted(self.events, key=lambda event: event.time)[:events]
        crowd = self.crowd
        return Trace(
            tuple(self.pieces), tuple(ordered), crowd.model.shape, crowd.operations_per_second
        )

    def _note(self, event: TraceEvent) -> None:
        self.events.append(event)
        heappush(self.coming, event.time)

    def _add(
        self, session: int, tokens: int, before: int, replaces: int, is_refused: bool = False
    ) -> int:
        crowd = self.crowd
        start = self.pieces[before].tokens if before != NONE else 0
        each = crowd.model.shape.bytes_per_token(KVSource.ENTRIES)
        seconds = self._seconds(tokens)
        if session == NONE:
            piece = CachedObject(session, tokens, each * tokens, seconds)
        elif crowd.form is StateForm.WHOLE:
            size = max(1, int(crowd.kept * each * tokens))
            piece = CachedObject(session, tokens, size, seconds, before, NONE, replaces)
        else:
            size = max(1, each * (tokens - start))
            refused = replaces if is_refused else NONE
            piece = CachedObject(
                session, tokens, size, seconds - self._seconds(start), before, before, refused
            )
        self.pieces.append(piece)
        return len(self.pieces) - 1

    def _seconds(self, tokens: int) -> float:
        return prefill_seconds(self.crowd.model.shape, tokens, self.crowd.operations_per_second)
