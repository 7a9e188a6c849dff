"""The contract of eviction: what a candidate is worth; who goes first follows from it.

Three things hold whatever the rule says of worth:

- What a newer state of its session replaces goes before all others (`SupersededOrder` has other
fates).
- A pin is soft. A pinned candidate stands behind all that are not; when its time is over it comes
  forward through the queue, half of the way in each half-life. What is pinned goes when nothing
  else is left, so that a tier is never full of wishes.
- Nothing goes before what continues it, which would be useless.

Rules are frozen values: what a tier must remember between two calls stands in its candidates and
in the clock that it is told to set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from larder.core.errors import BadParameter
from larder.core.family import Family
from larder.core.spelling import name_of
from larder.store.candidates import Candidate, CandidateColumns, FloatColumn

EVICTIONS = Family("eviction", "larder.store.eviction")


class SupersededOrder(Enum):
    """When states go that a newer one of their session replaces.

    FIRST: before everything else.
    INSIDE: before the states of their own session that nothing replaces, and else by their worth.
    ALIKE: by their worth alone, as if nothing replaced them.
    """

    FIRST = "first"
    INSIDE = "inside"
    ALIKE = "alike"


@dataclass(frozen=True)
class EvictionOrder:
    """Who goes.

    Args:
        rows: of the candidates, in the order in which they go.
        clock: what the tier's clock is from now on; candidates that are used later get it.
    """

    rows: tuple[int, ...]
    clock: float = 0.0


@dataclass(frozen=True)
class EvictionPolicy(ABC):
    """A rule for who leaves a tier that is full.

    Args:
        superseded: when states go that a newer one replaces.
        half_life: seconds in which a pin loses half of its strength once its time is over.
    """

    superseded: SupersededOrder = SupersededOrder.FIRST
    half_life: float = 600.0

    def __post_init__(self) -> None:
        if not self.half_life > 0:
            raise BadParameter(
                f"{name_of(type(self))}.half_life must be more than 0 seconds, "
                f"got {self.half_life}."
            )

    @abstractmethod
    def worth(self, held: CandidateColumns, now: float) -> FloatColumn:
        """What keeping each is worth [N], in any unit: the least goes first, of equals who was
        used longest ago."""

    def clock(self, gone: FloatColumn) -> float:
        """The tier's clock after some have gone: what these were worth, without those who went
        because others replace them."""
        del gone
        return 0.0

    def order(self, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """All of them, who goes first first."""
        held = CandidateColumns.of(candidates)
        return [candidates[row] for row in self.leaving(held, now, int(held.bytes.sum())).rows]

    def leaving(self, held: CandidateColumns, now: float, wanted_bytes: int) -> EvictionOrder:
        """Those who must go for so many bytes; all who can if these are too few."""
        if not len(held):
            return EvictionOrder(())
        worth = self.worth(held, now)
        keys = self._keys(held, worth, now)
        children, stays = held.children.copy(), np.ones(len(held), np.bool_)
        rows: list[int] = []
        freed = 0
        while freed < wanted_bytes and len(free := np.flatnonzero(stays & (children == 0))):
            row = _least_row(keys, free)
            rows.append(row)
            stays[row] = False
            freed += int(held.bytes[row])
            if (parent := held.parents[row]) >= 0:
                children[held.codes == parent] -= 1
        return EvictionOrder(tuple(rows), self.clock(self._judged(held, worth, rows)))

    def _judged(self, held: CandidateColumns, worth: FloatColumn, rows: list[int]) -> FloatColumn:
        if self.superseded is not SupersededOrder.ALIKE:
            rows = [row for row in rows if not held.superseded[row]]
        return worth[rows]

    def _keys(self, held: CandidateColumns, worth: FloatColumn, now: float) -> list[FloatColumn]:
        """What decides, the most important first; the least goes."""
        newest, replaced = (~held.superseded).astype(np.float64), held.superseded
        if self.superseded is SupersededOrder.INSIDE and replaced.any():
            worth = np.where(replaced, np.minimum(worth, _least_of_sessions(held, worth)), worth)
            keys = [worth, newest, held.last_used]
        elif self.superseded is SupersededOrder.FIRST and replaced.any():
            keys = [newest, worth, held.last_used]
        else:
            keys = [worth, held.last_used]
        pins = self._pins(held, now)
        if not pins.any():
            return keys
        order = np.lexsort(keys[::-1])
        places = np.empty(len(held))
        places[order] = np.arange(len(held)) / len(held)
        return [places + pins]

    def _pins(self, held: CandidateColumns, now: float) -> FloatColumn:
        """How much of the queue each is behind its place: 1 while it is pinned, then less."""
        over = np.maximum(now - held.pinned_until, 0.0)
        return np.exp2(-over / self.half_life)


def _least_row(keys: Sequence[FloatColumn], rows: np.ndarray) -> int:
    for key in keys:
        values = key[rows]
        rows = rows[values == values.min()]
        if len(rows) == 1:
            break
    return int(rows[0])


def _least_of_sessions(held: CandidateColumns, worth: FloatColumn) -> FloatColumn:
    """By row, the least that a state of its session is worth which nothing replaces."""
    sessions, places = np.unique(held.sessions, return_inverse=True)
    least = np.full(len(sessions), np.inf)
    newest = ~held.superseded
    np.minimum.at(least, places[newest], worth[newest])
    return least[places]
