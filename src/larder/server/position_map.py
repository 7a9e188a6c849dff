"""Positions of a session's chat caches in its transcript."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PositionMap:
    """Map from cache positions to transcript positions, piecewise contiguous.

    Args:
        starts: ascending cache positions at which a contiguous segment starts.
        texts: transcript positions of the same segment starts.
    """

    starts: tuple[int, ...] = (0,)
    texts: tuple[int, ...] = (0,)

    def transcript_positions(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Transcript positions of cache positions."""
        found = list[int]()
        for position in positions:
            part = bisect_right(self.starts, position) - 1
            found.append(self.texts[part] + position - self.starts[part])
        return tuple(found)

    def with_segment(self, start: int, text: int) -> PositionMap:
        """The map after a turn was read at cache position `start`, transcript position `text`."""
        kept = sum(each < start for each in self.starts)
        return PositionMap((*self.starts[:kept], start), (*self.texts[:kept], text))


@dataclass
class PositionMaps:
    """Position maps of all caches of a session, by cache number."""

    own: dict[int, PositionMap] = field(default_factory=dict)

    def of(self, number: int) -> PositionMap:
        """Map of one cache; the identity if nothing is recorded."""
        return self.own.get(number, PositionMap())

    def file(self, source: int, target: int, start: int, text: int) -> None:
        """Record a turn that was read at `start` over cache `source`, and is in cache `target`."""
        self.own[target] = self.of(source).with_segment(start, text)

    def refresh(self, positions: Sequence[int], text: int) -> None:
        """Reset the maps of caches rebuilt from the whole text: their length equals its length."""
        for index, position in enumerate(positions):
            if position == text:
                self.own[index] = PositionMap()
