"""A tier as a dictionary of candidates, and a replay that asks the rule for the whole order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from larder.store import Candidate, EvictionPolicy
from larder_bench.traces.base import (
    NONE,
    CachedObject,
    HintEvent,
    PinEvent,
    ReadEvent,
    ReplayTier,
    Trace,
    WriteEvent,
)


@dataclass
class Loop(ReplayTier):
    """Of traces without pauses that are known: no rule that asks for them."""

    trace: Trace
    rule: EvictionPolicy
    budget_bytes: int
    held: dict[int, Candidate] = field(default_factory=dict[int, Candidate])
    found: dict[int, int] = field(default_factory=dict[int, int])
    newest: dict[int, int] = field(default_factory=dict[int, int])
    hit_tokens: int = 0
    evictions: int = 0

    def run(self) -> None:
        for event in self.trace.events:
            event.play(self)

    def chain(self, object_id: int, link: str) -> list[CachedObject]:
        out = []
        while object_id != NONE:
            out.append(object_id)
            object_id = getattr(self.trace.objects[object_id], link)
        return out

    def read(self, event: ReadEvent) -> None:
        there = [
            object_id
            for object_id in self.chain(event.object_id, "before")
            if object_id in self.held
        ]
        self.found[event.session] = self.trace.objects[there[0]].tokens if there else 0
        self.hit_tokens += self.found[event.session]
        for object_id in self.chain(there[0], "parent") if there else []:
            one = self.held[object_id]
            self.held[object_id] = replace(one, last_used=event.time, uses=one.uses + 1)

    def write(self, event: WriteEvent) -> None:
        self.newest[event.session] = event.object_id
        objects = self.trace.objects
        for object_id in reversed(self.chain(event.object_id, "before")):
            cached = objects[object_id]
            shared = cached.session == NONE or cached.parent != NONE or object_id == event.object_id
            if object_id in self.held or not shared or cached.tokens <= self.found[event.session]:
                continue
            if not self.put(object_id, event.time):
                return
        old = objects[event.object_id].replaces
        if old in self.held:
            self.held[old] = replace(self.held[old], superseded=True)

    def put(self, object_id: int, now: float) -> bool:
        cached = self.trace.objects[object_id]
        if cached.bytes > self.budget_bytes or (
            cached.parent != NONE and cached.parent not in self.held
        ):
            return False
        coming = Candidate(
            str(object_id),
            cached.bytes,
            cached.seconds,
            now,
            session=str(cached.session),
            parent="",
        )
        if cached.parent != NONE:
            coming = replace(coming, parent=str(cached.parent))
        # What comes stands in the line, so that what it continues stays, and is passed over.
        line = [one for one in self.rule.order([*self.held.values(), coming], now)]
        for one in line:
            if sum(o.bytes for o in self.held.values()) + cached.bytes <= self.budget_bytes:
                break
            above = [str(p) for p in self.chain(object_id, "parent")]
            if one.name not in above:
                del self.held[int(one.name)]
                self.evictions += 1
                old = self.trace.objects[int(one.name)].replaces
                if old in self.held:
                    self.held[old] = replace(self.held[old], superseded=False)
        if sum(o.bytes for o in self.held.values()) + cached.bytes > self.budget_bytes:
            return False
        self.held[object_id] = coming
        return True

    def hint(self, event: HintEvent) -> None:
        for object_id in self.chain(self.newest.get(event.session, NONE), "before"):
            if object_id in self.held:
                steps = 1.0 if self.trace.objects[object_id].session == NONE else event.steps
                self.held[object_id] = replace(self.held[object_id], steps=steps)

    def pin(self, event: PinEvent) -> None:
        for object_id in self.chain(self.newest.get(event.session, NONE), "parent"):
            if object_id in self.held:
                self.held[object_id] = replace(self.held[object_id], pinned_until=event.until)
