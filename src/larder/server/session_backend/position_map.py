"""Where in a conversation that stands what its caches hold.

Each cache counts the tokens that it has read. Where episodes have one each, a turn is read by one
of them alone, and the others do not count it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PositionMap:
    """The way from places in a cache to places in the text.

    Args:
        starts: places in the cache, ascending, from each of which on the text goes on without a
            gap; `texts` are the places in the text that they are.
    """

    starts: tuple[int, ...] = (0,)
    texts: tuple[int, ...] = (0,)

    def placed(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Places in the text."""
        found = list[int]()
        for position in positions:
            part = bisect_right(self.starts, position) - 1
            found.append(self.texts[part] + position - self.starts[part])
        return tuple(found)

    def going_on(self, start: int, text: int) -> PositionMap:
        """The same, where a turn was read at place `start` that stands at `text` in the text."""
        kept = sum(each < start for each in self.starts)
        return PositionMap((*self.starts[:kept], start), (*self.texts[:kept], text))


@dataclass
class PositionMaps:
    """Those of every cache of a conversation, by number."""

    own: dict[int, PositionMap] = field(default_factory=dict)

    def of(self, number: int) -> PositionMap:
        """Those of one cache."""
        return self.own.get(number, PositionMap())

    def file(self, drawn: int, filed: int, start: int, text: int) -> None:
        """A turn was read at `start` over cache `drawn`, and is in cache `filed`."""
        self.own[filed] = self.of(drawn).going_on(start, text)

    def refresh(self, positions: Sequence[int], text: int) -> None:
        """Caches that have read as many tokens as the text has were built of all of it."""
        for number, position in enumerate(positions):
            if position == text:
                self.own[number] = PositionMap()
