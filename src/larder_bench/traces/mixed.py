"""Agents, workflows and people on one tier, each as they are alone.

No paper. What nobody gives hints for must do without, beside those who do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from larder_bench.traces.agents import Agents
from larder_bench.traces.base import NONE, CachedObject, Trace, TraceEvent, Workload
from larder_bench.traces.chat import ChatWorkload
from larder_bench.traces.workflows import Workflows


@dataclass(frozen=True)
class MixedWorkload(Workload):
    """All of them, for as long as each lasts that long.

    Args:
        jobs_per_hour, flows_per_hour, talks_per_hour: that begin of each.
    """

    jobs_per_hour: float = 40.0
    flows_per_hour: float = 20.0
    talks_per_hour: float = 300.0

    def make(self, seed: int, events: int) -> Trace:
        same = (self.model, self.form, self.kept, self.operations_per_second)
        crowds = (
            Agents(*same, jobs_per_hour=self.jobs_per_hour),
            Workflows(*same, flows_per_hour=self.flows_per_hour),
            ChatWorkload(*same, talks_per_hour=self.talks_per_hour),
        )
        traces = [crowd.make(seed, events) for crowd in crowds]
        until = min(trace.events[-1].time for trace in traces)
        pieces, parts = list[CachedObject](), list[list[TraceEvent]]()
        sessions = 0
        for trace in traces:
            behind = len(pieces), sessions
            parts.append([event.moved(*behind) for event in trace.events])
            pieces += [_shifted(piece, *behind) for piece in trace.pieces]
            sessions = 1 + max(piece.session for piece in pieces)
        ordered = sorted(chain(*parts), key=lambda event: event.time)
        together = tuple(event for event in ordered if event.time <= until)[:events]
        return replace(traces[0], pieces=tuple(pieces), events=together)


def _shifted(piece: CachedObject, pieces: int, sessions: int) -> CachedObject:
    """A piece behind so many others."""
    return replace(
        piece,
        session=piece.session if piece.session == NONE else piece.session + sessions,
        before=piece.before if piece.before == NONE else piece.before + pieces,
        parent=piece.parent if piece.parent == NONE else piece.parent + pieces,
        replaces=piece.replaces if piece.replaces == NONE else piece.replaces + pieces,
    )


Part = MixedWorkload
