"""Order in which sessions leave a full tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations
from larder.server.tiers.eviction_tuner import EvictionTuner
from larder.store.eviction._replay import StateUse
from larder.store.eviction.base import Candidate, CandidateColumns
from larder.store.ledger import Tier

FOREVER = float("inf")


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
        leaving = self.tuner.rule.select_victims(columns, self._now(), missing)
        self._clocks[tier] = max(self.clock(tier), leaving.clock)
        return [idle[row] for row in leaving.rows]

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
        parked = residency.host_bytes if residency.is_resident else 0
        return Candidate(
            name=str(session.key),
            bytes=max(1, self._reservations.bytes_of(session.key) + parked),
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
