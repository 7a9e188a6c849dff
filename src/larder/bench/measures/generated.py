"""Answers that are really given, token by token, under the policy: exact match, F1, latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from larder.bench.cells import Cell
from larder.bench.marking import Posed, said_items
from larder.bench.measures.base import Measure
from larder.bench.rows import Row
from larder.bench.sittings import Readings, sit
from larder.bench.speaking import Said, speak
from larder.bench.timing import percentiles
from larder.bench.workbench import Workbench
from larder.engine.engine import Engine
from larder.session.memory import Memory


@dataclass(frozen=True)
class GeneratedAnswers(Measure):
    """How well answers agree with the expected ones, and how fast they come."""

    def measure(self, bench: Workbench, cell: Cell, guess: float | None) -> Row:
        readings = Readings.of(bench, cell, guess)
        speaker = Speaker()
        items = sit(readings, cell.task, speaker)
        figures = readings.figures()
        peak = max(figures["peak_kv_bytes"], *(said.held_bytes for said in speaker.said))
        told = {"peak_kv_bytes": peak, "latency": speaker.latency()}
        return figures | told | {"items": items}


@dataclass
class Speaker:
    """Asks aloud, and remembers how long answers took."""

    said: list[Said] = field(default_factory=list)

    def ask(self, engine: Engine, memory: Memory, posed: Sequence[Posed]) -> list[Row]:
        """The items of all these questions."""
        items: list[Row] = []
        for one in posed:
            said = speak(engine, memory, one.question)
            self.said.append(said)
            items += said_items(one, said.text)
        return items

    def latency(self) -> Row:
        """Seconds to the first token of an answer, and from one to the next."""
        first = [one.first_seconds for one in self.said if one.first_seconds is not None]
        later = [seconds for one in self.said for seconds in one.token_seconds]
        told = {"first_token": first, "token": later}
        return {name: percentiles(seconds) for name, seconds in told.items() if seconds}


Part = GeneratedAnswers
