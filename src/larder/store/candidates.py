"""What may leave a tier, and what is known of it: one as a value, many as columns.

Times are seconds of one clock that all candidates of a tier share. A candidate is either a state of
a session or a chunk of a prefix that several sessions may share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from larder.core.errors import BadParameter

FloatColumn = NDArray[np.float64]
IntColumn = NDArray[np.int64]
BoolColumn = NDArray[np.bool_]
NUM_QUANTILES = 8  # of a pause, as columns hold it
NO_CODE = -1  # the code of no session and no parent


@dataclass(frozen=True)
class Candidate:
    """One thing that a tier holds and could give up.

    Args:
        name: no other candidate has it.
        bytes: that its leaving sets free; at least 1.
        seconds: that it takes to compute it again, where what it continues is there. Operations do
            as well, if all candidates are told in them and no rule weighs them against time.
        last_used: when it was last read or written.
        uses: how often so far.
        clock: of the tier when it was last used; `gdsf` alone has one.
        session: whose state it is; empty for what sessions share.
        superseded: a newer state of its session is held, which replaces it.
        pinned_until: when somebody's wish to keep it begins to fade.
        steps: of a workflow until it is needed; infinite where nobody knows.
        pauses: the seconds after which 1/n, 2/n, ... n/n of pauses like the one that its session
            makes now were over; empty where nothing is known of them.
        parent: the candidate that it continues and is useless without; empty for none.
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
    parent: str = ""

    def __post_init__(self) -> None:
        if self.bytes < 1:
            raise BadParameter(
                f"Candidate {self.name!r} must have 1 byte or more, got {self.bytes}."
            )


@dataclass
class CandidateColumns:
    """The same of many, a row each.

    Args:
        codes, sessions, parents: numbers that stand for names; `NO_CODE` for no session, no parent.
        children: how many other rows continue this one.
        pauses: [N, QUANTILES]; infinite where nothing is known.
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
    parents: IntColumn
    children: IntColumn

    def __len__(self) -> int:
        return len(self.codes)

    @staticmethod
    def of(told: Sequence[Candidate]) -> CandidateColumns:
        """Columns of candidates, in their order.

        Raises:
            BadParameter: two have one name.
        """
        codes = [_code(one.name) for one in told]
        if len(set(codes)) < len(codes):
            raise BadParameter("Two candidates have one name: give each its own.")
        parents = np.array([_code(one.parent) for one in told], np.int64)
        held = {code: row for row, code in enumerate(codes)}
        children = np.zeros(len(told), np.int64)
        for parent in parents.tolist():
            if parent in held:
                children[held[parent]] += 1
        return CandidateColumns(
            codes=np.array(codes, np.int64),
            bytes=np.array([one.bytes for one in told], np.int64),
            seconds=np.array([one.seconds for one in told], np.float64),
            last_used=np.array([one.last_used for one in told], np.float64),
            uses=np.array([one.uses for one in told], np.int64),
            clock=np.array([one.clock for one in told], np.float64),
            sessions=np.array([_code(one.session) for one in told], np.int64),
            superseded=np.array([one.superseded for one in told], np.bool_),
            pinned_until=np.array([one.pinned_until for one in told], np.float64),
            steps=np.array([one.steps for one in told], np.float64),
            pauses=np.array([pause_quantiles(one.pauses) for one in told]).reshape(
                -1, NUM_QUANTILES
            ),
            parents=parents,
            children=children,
        )

    @staticmethod
    def blank(rows: int) -> CandidateColumns:
        """Rows to be filled in."""
        columns = CandidateColumns.of([Candidate("", 1, 0.0, 0.0)])
        return CandidateColumns(
            **{f.name: np.repeat(getattr(columns, f.name), rows, 0) for f in fields(columns)}
        )

    def first(self, rows: int) -> CandidateColumns:
        """The first rows, in the same memory."""
        return CandidateColumns(**{name: column[:rows] for name, column in vars(self).items()})

    def move(self, source: int, target: int) -> None:
        """Write one row over another."""
        for column in vars(self).values():
            column[target] = column[source]


def pause_quantiles(pauses: Sequence[float]) -> FloatColumn:
    """Pauses at `NUM_QUANTILES` equal shares; of fewer or more that are known, the next higher
    one.
    """
    if not pauses:
        return np.full(NUM_QUANTILES, np.inf)
    ordered = np.sort(np.asarray(pauses, np.float64))
    places = (
        np.ceil(np.arange(1, NUM_QUANTILES + 1) * len(ordered) / NUM_QUANTILES).astype(np.int64) - 1
    )
    return ordered[places]


def _code(name: str) -> int:
    if not name:
        return NO_CODE
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
