"""Contract of eviction policies: the worth of each candidate, from which the order follows.

Three rules hold for every policy:

- States that a newer state of their session has superseded are evicted first (see
  `SupersededOrder`).
- A pin is soft. Pinned candidates are evicted after all others. Once a pin has expired, its
  candidate moves forward in the queue, half of the way in each half-life.
- A candidate is evicted after all candidates that continue it, which would be useless without it.

Policies are frozen values: the state between two calls is in the candidates and in the tier's
clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from hashlib import blake2b
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from larder.core.errors import BadParameter
from larder.core.registry import Family, public_name

EVICTIONS = Family("eviction", "larder.store.eviction")
NUM_QUANTILES = 8  # quantiles of pauses in columns
QUANTILE_SHARES = np.arange(1, NUM_QUANTILES + 1) / NUM_QUANTILES
NO_CODE = -1  # code of no session and no parent


class SupersededOrder(Enum):
    """Order of states that a newer state of their session has superseded.

    FIRST: before everything else.
    INSIDE: before the current states of their own session, otherwise by worth.
    ALIKE: by worth alone, like current states.
    """

    FIRST = "first"
    INSIDE = "inside"
    ALIKE = "alike"


@dataclass(frozen=True)
class EvictionOrder:
    """Result of a selection: the victims in order, and the tier's new clock.

    Args:
        rows: of the candidates, in the order of their eviction.
        clock: new clock of the tier, which candidates get when they are used.
    """

    rows: tuple[int, ...]
    clock: float = 0.0


@dataclass(frozen=True)
class EvictionPolicy(ABC):
    """Rule that selects the victims in a full tier.

    Args:
        superseded: order of superseded states.
        half_life: seconds in which an expired pin loses half of its strength.
    """

    # True if sessions that a workflow uses next are fetched before they are asked.
    prefetches: ClassVar[bool] = False
    # True if costs of candidates are operations; otherwise seconds.
    counts_operations: ClassVar[bool] = False

    superseded: SupersededOrder = SupersededOrder.FIRST
    half_life: float = 600.0

    def __post_init__(self) -> None:
        if not self.half_life > 0:
            raise BadParameter(
                f"{public_name(type(self))}.half_life must be more than 0 seconds, "
                f"got {self.half_life}."
            )

    def variants(self) -> Sequence[EvictionPolicy]:
        """Policies of which a server takes the one that would have saved most in its first
        requests; none for a policy that stays as it is."""
        return ()

    @abstractmethod
    def worth(self, candidates: CandidateColumns, now: float) -> FloatColumn:
        """Worth of each candidate [N], in any unit: lowest first, ties by least recent use."""

    def clock(self, victims_worth: FloatColumn) -> float:
        """Clock of the tier after an eviction, from the worth of victims that were not
        superseded.
        """
        return 0.0

    def order(self, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """All candidates in eviction order."""
        held = CandidateColumns.of(candidates)
        return [
            candidates[row] for row in self.select_victims(held, now, int(held.bytes.sum())).rows
        ]

    def select_victims(
        self, candidates: CandidateColumns, now: float, wanted_bytes: int
    ) -> EvictionOrder:
        """Victims that free `wanted_bytes`; all candidates if they free less."""
        if not len(candidates):
            return EvictionOrder(())
        worth = self.worth(candidates, now)
        keys = self._keys(candidates, worth, now)
        children, stays = candidates.children.copy(), np.ones(len(candidates), np.bool_)
        rows: list[int] = []
        freed = 0
        while freed < wanted_bytes and len(free := np.flatnonzero(stays & (children == 0))):
            row = _least_row(keys, free)
            rows.append(row)
            stays[row] = False
            freed += int(candidates.bytes[row])
            if (parent := candidates.parents[row]) >= 0:
                children[candidates.codes == parent] -= 1
        return EvictionOrder(
            tuple(rows), self.clock(self._worth_of_victims(candidates, worth, rows))
        )

    def _worth_of_victims(
        self, candidates: CandidateColumns, worth: FloatColumn, rows: list[int]
    ) -> FloatColumn:
        if self.superseded is not SupersededOrder.ALIKE:
            rows = [row for row in rows if not candidates.superseded[row]]
        return worth[rows]

    def _keys(
        self, candidates: CandidateColumns, worth: FloatColumn, now: float
    ) -> list[FloatColumn]:
        """Sort keys, most significant first; the lowest is evicted."""
        newest, replaced = (~candidates.superseded).astype(np.float64), candidates.superseded
        if self.superseded is SupersededOrder.INSIDE and replaced.any():
            worth = np.where(
                replaced, np.minimum(worth, _least_of_sessions(candidates, worth)), worth
            )
            keys = [worth, newest, candidates.last_used]
        elif self.superseded is SupersededOrder.FIRST and replaced.any():
            keys = [newest, worth, candidates.last_used]
        else:
            keys = [worth, candidates.last_used]
        pins = self._pins(candidates, now)
        if not pins.any():
            return keys
        order = np.lexsort(keys[::-1])
        indices = np.empty(len(candidates))
        indices[order] = np.arange(len(candidates)) / len(candidates)
        return [indices + pins]

    def _pins(self, candidates: CandidateColumns, now: float) -> FloatColumn:
        """Pin strength in the queue: 1 while pinned, then decaying."""
        over = np.maximum(now - candidates.pinned_until, 0.0)
        return np.exp2(-over / self.half_life)


def _least_row(keys: Sequence[FloatColumn], rows: np.ndarray) -> int:
    for key in keys:
        values = key[rows]
        rows = rows[values == values.min()]
        if len(rows) == 1:
            break
    return int(rows[0])


def _least_of_sessions(candidates: CandidateColumns, worth: FloatColumn) -> FloatColumn:
    """Lowest worth, by row, among the session's states that are not superseded."""
    sessions, indices = np.unique(candidates.sessions, return_inverse=True)
    least = np.full(len(sessions), np.inf)
    newest = ~candidates.superseded
    np.minimum.at(least, indices[newest], worth[newest])
    return least[indices]


FloatColumn = NDArray[np.float64]
IntColumn = NDArray[np.int64]
BoolColumn = NDArray[np.bool_]


@dataclass(frozen=True)
class Candidate:
    """Unit of eviction: a chunk, or the state of a session.

    Args:
        name: unique name.
        bytes: bytes that its eviction frees; at least 1.
        seconds: time to compute it again if its parent is present. Another unit, such as
            operations, is valid if all candidates use it and the policy does not compare it with
            time.
        last_used: time of the last read or write.
        uses: number of uses.
        clock: clock of the tier at the last use; only `gdsf` has one.
        session: session that it is a state of; empty for shared chunks.
        superseded: True if a newer state of its session is stored.
        pinned_until: time at which its pin expires.
        steps: steps of a workflow until it is needed; infinite if unknown.
        pauses: seconds that similar pauses of its session took; empty if unknown.
        wait_seconds: mean wait of requests in the queue, which a request that finds its state does
            not have again; 0 if unknown.
        parent: candidate that it continues and is useless without; empty for none.
    """

    name: str
    bytes: int
    seconds: float
    last_used: float
    uses: int = 1
    clock: float = 0.0
    session: str = ""
    superseded: bool = False
    pinned_until: float = -math.inf
    steps: float = math.inf
    pauses: tuple[float, ...] = ()
    wait_seconds: float = 0.0
    parent: str = ""

    def __post_init__(self) -> None:
        if self.bytes < 1:
            raise BadParameter(
                f"Candidate {self.name!r} must have 1 byte or more, got {self.bytes}."
            )


@dataclass
class CandidateColumns:
    """Candidates as columns, one row each.

    Args:
        codes, sessions, parents: numbers in place of names; `NO_CODE` for no session, no parent.
        children: number of rows that continue this one.
        pauses: [N, QUANTILES]; infinite where unknown.
        pause_shares: shares of similar pauses that are over by then [N, QUANTILES].
    """

    codes: IntColumn
    bytes: IntColumn
    seconds: FloatColumn
    last_used: FloatColumn
    uses: IntColumn
    clock: FloatColumn
    sessions: IntColumn
    superseded: BoolColumn
    pinned_until: FloatColumn
    steps: FloatColumn
    pauses: FloatColumn
    pause_shares: FloatColumn
    wait_seconds: FloatColumn
    parents: IntColumn
    children: IntColumn

    def __len__(self) -> int:
        return len(self.codes)

    @staticmethod
    def of(candidates: Sequence[Candidate]) -> CandidateColumns:
        """Columns of candidates, in their order.

        Raises:
            BadParameter: two candidates have the same name.
        """
        codes = [_code(each.name) for each in candidates]
        if len(set(codes)) < len(codes):
            raise BadParameter("Two candidates have one name: give each its own.")
        parents = np.array([_code(each.parent) for each in candidates], np.int64)
        rows = {code: row for row, code in enumerate(codes)}
        children = np.zeros(len(candidates), np.int64)
        for parent in parents.tolist():
            if parent in rows:
                children[rows[parent]] += 1
        pauses = np.array([pause_quantiles(each.pauses) for each in candidates])
        shares = np.array([pause_shares(each.pauses) for each in candidates])

        def floats(name: str) -> FloatColumn:
            return np.array([getattr(each, name) for each in candidates], np.float64)

        return CandidateColumns(
            codes=np.array(codes, np.int64),
            bytes=np.array([each.bytes for each in candidates], np.int64),
            seconds=floats("seconds"),
            last_used=floats("last_used"),
            uses=np.array([each.uses for each in candidates], np.int64),
            clock=floats("clock"),
            sessions=np.array([_code(each.session) for each in candidates], np.int64),
            superseded=np.array([each.superseded for each in candidates], np.bool_),
            pinned_until=floats("pinned_until"),
            steps=floats("steps"),
            pauses=pauses.reshape(-1, NUM_QUANTILES),
            pause_shares=shares.reshape(-1, NUM_QUANTILES),
            wait_seconds=floats("wait_seconds"),
            parents=parents,
            children=children,
        )

    @staticmethod
    def empty(rows: int) -> CandidateColumns:
        """Columns with uninitialized rows."""
        columns = CandidateColumns.of([Candidate("", 1, 0.0, 0.0)])
        return CandidateColumns(
            **{f.name: np.repeat(getattr(columns, f.name), rows, 0) for f in fields(columns)}
        )

    def take(self, rows: IntColumn) -> CandidateColumns:
        """Copy of some rows, in this order."""
        return CandidateColumns(**{name: column[rows] for name, column in vars(self).items()})

    def first(self, rows: int) -> CandidateColumns:
        """First rows, as a view of the same memory."""
        return CandidateColumns(**{name: column[:rows] for name, column in vars(self).items()})

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for column in vars(self).values():
            column[target] = column[source]


def pause_quantiles(pauses: Sequence[float]) -> FloatColumn:
    """Quantiles of pauses at `NUM_QUANTILES` equal shares, each the next higher known pause."""
    if not pauses:
        return np.full(NUM_QUANTILES, np.inf)
    ordered = np.sort(np.asarray(pauses, np.float64))
    indices = (
        np.ceil(np.arange(1, NUM_QUANTILES + 1) * len(ordered) / NUM_QUANTILES).astype(np.int64) - 1
    )
    return ordered[indices]


def pause_shares(pauses: Sequence[float]) -> FloatColumn:
    """Share of pauses that are over at each of their `pause_quantiles`, which includes all pauses
    if they are few."""
    if not pauses:
        return QUANTILE_SHARES
    ordered = np.sort(np.asarray(pauses, np.float64))
    return np.searchsorted(ordered, pause_quantiles(pauses), "right") / len(ordered)


def _code(name: str) -> int:
    if not name:
        return NO_CODE
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
