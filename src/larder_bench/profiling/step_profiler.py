"""Profiler of decode steps, with clocks around the methods that do the work.

attention   appending a token, attention over fast entries and recalled pages, and merging these
search      searching pages in an index
gather      moving pages that are not in the fast tier yet
insert      inserting offloaded entries into an index
park        moving entries to the slow tier
evict       applying plans
policy      all other observers: tallies, scores, plans
model       the rest: the weights

Time counts once, for the innermost part. The clocks are removed at the end. Other threads are not
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from larder.cache import CacheLayer, PageFetcher, PagePool, SequenceCache, SlowTier
from larder.core import RecallIndex
from larder.models import Observer
from larder_bench.profiling.timing import percentiles

Clock = Callable[[], float]
MODEL, POLICY = "model", "policy"
PARTS = ("attention", "search", "gather", "insert", "park", "evict", POLICY, MODEL)


@dataclass
class StepProfiler:
    """Seconds by part of the latest step."""

    clock: Clock
    parts: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)
    _thread: int = field(default_factory=get_ident)

    def wrap(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Wrapper of a method that adds its own time to a part."""

        def timed(*args: Any, **named: Any) -> Any:
            if get_ident() != self._thread:
                return inner(*args, **named)
            started = self.clock()
            self._inner.append(0.0)
            try:
                return inner(*args, **named)
            finally:
                seconds, inner_seconds = self.clock() - started, self._inner.pop()
                self.parts[part] = self.parts.get(part, 0.0) + seconds - inner_seconds
                if self._inner:
                    self._inner[-1] += seconds

        return timed

    def wrap_observer(self, observer: Observer | None) -> Observer | None:
        """Observer whose time counts as the policy's."""
        return None if observer is None else self.wrap(observer, POLICY)

    def step(self, run: Callable[[], object]) -> dict[str, float]:
        """Seconds by part of one step."""
        self.parts = {}
        self.wrap(run, MODEL)()
        return self.parts


@contextmanager
def profile_steps(clock: Clock) -> Iterator[StepProfiler]:
    """Profiler with clocks around all parts of a decode step."""
    profiler, kinds = StepProfiler(clock), list(_profiled_methods())
    former = [vars(owner)[name] for owner, name, _ in kinds]
    for (owner, name, part), inner in zip(kinds, former, strict=True):
        setattr(owner, name, profiler.wrap(inner, part))
    try:
        yield profiler
    finally:
        for (owner, name, _), inner in zip(kinds, former, strict=True):
            setattr(owner, name, inner)


def part_percentiles(steps: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Median and 95th percentile of each part of the steps, in the order of `PARTS`."""
    parts = [part for part in PARTS if any(part in step for step in steps)]
    return [{"name": part} | percentiles([step.get(part, 0.0) for step in steps]) for part in parts]


def _profiled_methods() -> Iterator[tuple[type, str, str]]:
    """Classes, their methods, and the parts that these belong to."""
    yield CacheLayer, "attend", "attention"
    for owner in _subclasses(RecallIndex):
        for name, part in (("find", "search"), ("contents", "gather"), ("versions", "gather")):
            if name in vars(owner):
                yield owner, name, part
    yield PagePool, "load", "gather"
    yield PageFetcher, "update_index", "insert"
    for owner in (SlowTier, *_subclasses(SlowTier)):
        if "add" in vars(owner):
            yield owner, "add", "park"
    yield SequenceCache, "evict", "evict"


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
