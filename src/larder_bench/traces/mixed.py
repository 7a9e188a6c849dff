"""Mixture of agents, workflows and chats on one tier.

No paper. Sessions without hints share the tier with sessions that give hints.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from larder_bench.traces.agents import Agents
from larder_bench.traces.base import NONE, CachedObject, Trace, TraceEvent, Workload
from larder_bench.traces.chat import ChatWorkload
from larder_bench.traces.workflows import Workflows


@dataclass(frozen=True)
class MixedWorkload(Workload):
    """All three workloads, until the shortest trace ends.

    Args:
        jobs_per_hour: arrival rate of agents' jobs.
        flows_per_hour: arrival rate of workflows.
        talks_per_hour: arrival rate of conversations.
    """

    jobs_per_hour: float = 40.0
    flows_per_hour: float = 20.0
    talks_per_hour: float = 300.0

    def make(self, seed: int, events: int) -> Trace:
        common: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(Workload)}
        workloads: tuple[Workload, ...] = (
            Agents(**common, jobs_per_hour=self.jobs_per_hour),
            Workflows(**common, flows_per_hour=self.flows_per_hour),
            ChatWorkload(**common, talks_per_hour=self.talks_per_hour),
        )
        traces = [workload.make(seed, events) for workload in workloads]
        until = min(trace.events[-1].time for trace in traces)
        objects, parts = list[CachedObject](), list[list[TraceEvent]]()
        sessions = 0
        for trace in traces:
            offset = len(objects)
            parts.append([event.moved(offset, sessions) for event in trace.events])
            objects += [_shifted(cached, offset, sessions) for cached in trace.objects]
            sessions = 1 + max(cached.session for cached in objects)
        ordered = sorted(chain(*parts), key=lambda event: event.time)
        merged = tuple(event for event in ordered if event.time <= until)[:events]
        return replace(traces[0], objects=tuple(objects), events=merged)


def _shifted(cached: CachedObject, objects: int, sessions: int) -> CachedObject:
    """Object with its ids shifted behind those of other traces."""
    return replace(
        cached,
        session=cached.session if cached.session == NONE else cached.session + sessions,
        before=cached.before if cached.before == NONE else cached.before + objects,
        parent=cached.parent if cached.parent == NONE else cached.parent + objects,
        replaces=cached.replaces if cached.replaces == NONE else cached.replaces + objects,
    )


Part = MixedWorkload
