"""Order in which sessions leave a full tier, and the choice of an eviction policy's variant.

The variant is chosen by a replay of the first requests of a server (Marconi's tuner).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Thread

import numpy as np

from larder.core.spec import ModelSpec
from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations
from larder.store.eviction.base import Candidate, CandidateColumns, EvictionPolicy
from larder.store.ledger import Tier

REQUESTS_PER_EARLIER = 5  # requests that are replayed, for each before the first eviction
MAX_USES = 2048  # requests that are replayed, the latest
FOREVER = float("inf")


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


class EvictionTuner:
    """Eviction policy that is chosen once. For the model's thread; another one replays requests.

    Args:
        policy: the policy until then, and for good if it has no variants.
        capacity: bytes of the tier.
    """

    def __init__(self, policy: EvictionPolicy, capacity: Callable[[], int]) -> None:
        self.policy, self._capacity = policy, capacity
        self._variants = policy.variants()
        self._uses = deque[StateUse](maxlen=MAX_USES)
        self._count = self._wanted = 0
        self._thread: Thread | None = None

    @property
    def is_observing(self) -> bool:
        """True until requests are replayed."""
        return bool(self._variants) and self._thread is None

    def note_use(self, use: StateUse) -> None:
        """Record a request."""
        if not self.is_observing:
            return
        self._uses.append(use)
        self._count += 1
        if self._wanted and self._count >= self._wanted:
            self._thread = Thread(target=self._tune, args=(tuple(self._uses),), daemon=True)
            self._thread.start()

    def note_eviction(self) -> None:
        """Record an eviction; the first one decides how many requests are replayed."""
        self._wanted = self._wanted or REQUESTS_PER_EARLIER * max(1, self._count)

    def join(self) -> None:
        """Wait until requests that are being replayed have been."""
        if self._thread is not None:
            self._thread.join()

    def _tune(self, uses: Sequence[StateUse]) -> None:
        self.policy = best_variant(uses, self._variants, self._capacity())


def prefill_operations(spec: ModelSpec, num_weights: int, tokens: int) -> float:
    """Multiplications and additions that read a text, by all weights and by attention."""
    attended = sum(
        layer.query_heads * layer.head_dim * min((tokens + 1) / 2, layer.sliding_window or tokens)
        for layer in spec.layers
    )
    return float(tokens * (num_weights + 2 * attended))


class SessionEvictionOrder:
    """Sessions in the order in which an eviction policy evicts them. For the model's thread.

    Args:
        clock: seconds since 1970.
        cost: of reading a text of so many tokens, in seconds or operations.
    """

    def __init__(
        self,
        tuner: EvictionTuner,
        clock: Callable[[], float],
        reservations: DeviceReservations,
        cost: Callable[[int], float],
    ) -> None:
        self.tuner, self._now, self._reservations, self._cost = tuner, clock, reservations, cost
        self._clocks: dict[Tier, float] = {}

    def clock(self, tier: Tier) -> float:
        """Eviction clock of a tier, for policies with aging; a used session is set to it."""
        return self._clocks.get(tier, 0.0)

    def first(
        self,
        tier: Tier,
        sessions: Iterable[SessionState],
        excluded: SessionState | None,
        missing: int,
        tenant: str | None = None,
    ) -> list[SessionState]:
        """Sessions to evict for this many bytes, except for running ones and ones being written."""
        idle = [
            each for each in sessions if not (each.usage.is_running or each.residency.is_saving)
        ]
        idle = [each for each in idle if each is not excluded]
        idle = [each for each in idle if tenant in (None, each.tenant)]
        columns = CandidateColumns.of([self._candidate(each) for each in idle])
        victims = self.tuner.policy.select_victims(columns, self._now(), missing)
        self._clocks[tier] = max(self.clock(tier), victims.clock)
        return [idle[row] for row in victims.rows]

    def note_use(self, session: SessionState) -> None:
        """Record a request of a session."""
        residency = session.residency
        if self.tuner.is_observing and residency.is_resident:
            cost = self._cost(len(residency.cached_ids))
            use = StateUse(str(session.key), self._now(), max(1, residency.nbytes), cost)
            self.tuner.note_use(use)

    def _candidate(self, session: SessionState) -> Candidate:
        usage = session.usage
        residency = session.residency
        return Candidate(
            name=str(session.key),
            bytes=max(1, self._reservations.bytes_of(session.key) + residency.host_bytes),
            seconds=self._cost(len(residency.cached_ids)),
            last_used=usage.last_used,
            uses=usage.uses,
            clock=usage.clock,
            session=str(session.key),
            pinned_until=FOREVER if usage.is_pinned else -FOREVER,
            steps=usage.workflow_steps,
            pauses=usage.pause.pauses or tuple(usage.think_times),
            wait_seconds=usage.pause.wait_seconds,
        )
