"""Builder of traces: records what sessions do."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from larder.models import KVSource
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

TOKENS_PER_SECOND = 50.0  # of generated answers


@dataclass
class TraceSession:
    """State of a session.

    Args:
        number: number of the session.
        states: ids of its objects so far, the system prompt first; the last one has all its tokens.
    """

    number: int
    states: list[int]


@dataclass
class TraceBuilder:
    """Recorder of the sessions of a workload, in the order in which they begin."""

    workload: Workload
    objects: list[CachedObject] = field(default_factory=list[CachedObject])
    events: list[TraceEvent] = field(default_factory=list[TraceEvent])
    sessions: int = 0
    past: int = 0  # number of events before the last session began
    coming: list[float] = field(default_factory=list[float])  # times of later events, as a heap

    def has_events(self, events: int, until: float) -> bool:
        """Test if at least `events` events are before the time at which the next session begins."""
        while self.coming and self.coming[0] <= until:
            heappop(self.coming)
            self.past += 1
        return self.past >= events

    def prompt(self, tokens: int) -> int:
        """Object id of a new system prompt that sessions can begin with."""
        return self._add(NONE, tokens, NONE, NONE)

    def begin_session(self, prompt: int) -> TraceSession:
        self.sessions += 1
        return TraceSession(self.sessions - 1, [prompt])

    def turn(
        self, session: TraceSession, time: float, prompt_tokens: int, answer_tokens: int, tool: str
    ) -> float:
        """Record a turn; return the time at which it ends.

        Args:
            prompt_tokens: tokens added to the prompt.
            answer_tokens: generated tokens.
            tool: tool or person that the session then waits for.
        """
        last = session.states[-1]
        tokens = self.objects[last].tokens + prompt_tokens
        self._append(ReadEvent(time, session.number, last, tokens))
        over = time + answer_tokens / TOKENS_PER_SECOND
        newest = NONE if len(session.states) == 1 else last
        session.states.append(self._add(session.number, tokens + answer_tokens, last, newest))
        self._append(WriteEvent(over, session.number, session.states[-1], tool))
        return over

    def regenerate(
        self, session: TraceSession, time: float, prompt_tokens: int, answer_tokens: int, tool: str
    ) -> float:
        """Record the last turn again, with another answer, from the state before it."""
        refused = session.states.pop()
        before = session.states[-1]
        tokens = self.objects[before].tokens + prompt_tokens
        self._append(ReadEvent(time, session.number, before, tokens))
        over = time + answer_tokens / TOKENS_PER_SECOND
        session.states.append(
            self._add(session.number, tokens + answer_tokens, before, refused, True)
        )
        self._append(WriteEvent(over, session.number, session.states[-1], tool))
        return over

    def hint(self, session: TraceSession, time: float, steps: float) -> None:
        self._append(HintEvent(time, session.number, steps))

    def pin(self, session: TraceSession, time: float, until: float) -> None:
        self._append(PinEvent(time, session.number, until))

    def trace(self, events: int) -> Trace:
        """Trace of the first `events` events, ordered by time."""
        ordered = sorted(self.events, key=lambda event: event.time)[:events]
        workload = self.workload
        return Trace(
            tuple(self.objects),
            tuple(ordered),
            workload.model.shape,
            workload.operations_per_second,
        )

    def _append(self, event: TraceEvent) -> None:
        self.events.append(event)
        heappush(self.coming, event.time)

    def _add(
        self, session: int, tokens: int, before: int, replaces: int, is_refused: bool = False
    ) -> int:
        workload = self.workload
        start = self.objects[before].tokens if before != NONE else 0
        each = workload.model.shape.bytes_per_token(KVSource.ENTRIES)
        seconds = self._seconds(tokens)
        if session == NONE:
            cached = CachedObject(session, tokens, each * tokens, seconds)
        elif workload.form is StateForm.WHOLE:
            size = max(1, int(workload.kept * each * tokens))
            cached = CachedObject(session, tokens, size, seconds, before, NONE, replaces)
        else:
            size = max(1, each * (tokens - start))
            refused = replaces if is_refused else NONE
            cached = CachedObject(
                session, tokens, size, seconds - self._seconds(start), before, before, refused
            )
        self.objects.append(cached)
        return len(self.objects) - 1

    def _seconds(self, tokens: int) -> float:
        return prefill_seconds(
            self.workload.model.shape, tokens, self.workload.operations_per_second
        )
