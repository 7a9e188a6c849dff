"""Replay of a server's requests on a tier of whole states, to compare eviction policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from larder.store.eviction.base import Candidate, CandidateColumns, EvictionPolicy


@dataclass(frozen=True, slots=True)
class StateUse:
    """Request of a session, and the state that it left.

    Args:
        time: of the answer's end.
        bytes: of the state.
        cost: to compute the state again, in seconds or operations.
    """

    session: str
    time: float
    bytes: int
    cost: float


def saved_cost(uses: Sequence[StateUse], policy: EvictionPolicy, capacity: int) -> float:
    """Cost that a tier saves in a sequence of requests: that of the states that it still holds
    when their sessions are used again.

    Args:
        capacity: bytes of the tier.
    """
    names = list(dict.fromkeys(use.session for use in uses))
    rows = {name: row for row, name in enumerate(names)}
    states = CandidateColumns.of([Candidate(name, 1, 0.0, 0.0, session=name) for name in names])
    is_held, clock, saved = np.zeros(len(names), np.bool_), 0.0, 0.0
    states.uses[:] = 0
    for use in uses:
        row = rows[use.session]
        saved += float(states.seconds[row]) if is_held[row] else 0.0
        is_held[row] = False
        missing = int(states.bytes[is_held].sum()) + use.bytes - capacity
        if missing > 0:
            held = np.flatnonzero(is_held)
            victims = policy.select_victims(states.take(held), use.time, missing)
            is_held[held[list(victims.rows)]] = False
            clock = max(clock, victims.clock)
        states.bytes[row], states.seconds[row] = use.bytes, use.cost
        states.last_used[row], states.clock[row] = use.time, clock
        states.uses[row] += 1
        is_held[row] = use.bytes <= capacity
    return saved


def best_variant(
    uses: Sequence[StateUse], variants: Sequence[EvictionPolicy], capacity: int
) -> EvictionPolicy:
    """Policy that saves most in a sequence of requests; of equal ones the first."""
    return max(variants, key=lambda policy: saved_cost(uses, policy, capacity))
