"""A tier as a dictionary of candidates, and a replay that asks the rule for the whole order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from larder.store.eviction.base import Candidate, EvictionPolicy
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

    def chain(self, piece: int, link: str) -> list[CachedObject]:
        out = []
        while piece != NONE:
            out.append(piece)
            piece = getattr(self.trace.pieces[piece], link)
        return out

    def read(self, event: ReadEvent) -> None:
        there = [piece for piece in self.chain(event.piece, "before") if piece in self.held]
        self.found[event.session] = self.trace.pieces[there[0]].tokens if there else 0
        self.hit_tokens += self.found[event.session]
        for piece in self.chain(there[0], "parent") if there else []:
            one = self.held[piece]
            self.held[piece] = replace(one, last_used=event.time, uses=one.uses + 1)

    def write(self, event: WriteEvent) -> None:
        self.newest[event.session] = event.piece
        pieces = self.trace.pieces
        for piece in reversed(self.chain(event.piece, "before")):
            told = pieces[piece]
            shared = told.session == NONE or told.parent != NONE or piece == event.piece
            if piece in self.held or not shared or told.tokens <= self.found[event.session]:
                continue
            if not self.put(piece, event.time):
                return
        old = pieces[event.piece].replaces
        if old in self.held:
            self.held[old] = replace(self.held[old], superseded=True)

    def put(self, piece: int, now: float) -> bool:
        told = self.trace.pieces[piece]
        if told.bytes > self.budget_bytes or (told.parent != NONE and told.parent not in self.held):
            return False
        coming = Candidate(
            str(piece), told.bytes, told.seconds, now, session=str(told.session), parent=""
        )
        if told.parent != NONE:
            coming = replace(coming, parent=str(told.parent))
        # What comes stands in the line, so that what it continues stays, and is passed over.
        line = [one for one in self.rule.order([*self.held.values(), coming], now)]
        for one in line:
            if sum(o.bytes for o in self.held.values()) + told.bytes <= self.budget_bytes:
                break
            above = [str(p) for p in self.chain(piece, "parent")]
            if one.name not in above:
                del self.held[int(one.name)]
                self.evictions += 1
                old = self.trace.pieces[int(one.name)].replaces
                if old in self.held:
                    self.held[old] = replace(self.held[old], superseded=False)
        if sum(o.bytes for o in self.held.values()) + told.bytes > self.budget_bytes:
            return False
        self.held[piece] = coming
        return True

    def hint(self, event: HintEvent) -> None:
        for piece in self.chain(self.newest.get(event.session, NONE), "before"):
            if piece in self.held:
                steps = 1.0 if self.trace.pieces[piece].session == NONE else event.steps
                self.held[piece] = replace(self.held[piece], steps=steps)

    def pin(self, event: PinEvent) -> None:
        for piece in self.chain(self.newest.get(event.session, NONE), "parent"):
            if piece in self.held:
                self.held[piece] = replace(self.held[piece], pinned_until=event.until)
