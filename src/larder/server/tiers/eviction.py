"""In what order sessions leave a tier that is full."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations
from larder.server.tiers.disk import DiskTier
from larder.store.candidates import Candidate, CandidateColumns
from larder.store.eviction.base import EvictionPolicy
from larder.store.ledger import Tier

FOREVER = float("inf")


class SessionEvictionOrder:
    """Tells a rule of eviction what is known of sessions. For the model's thread.

    Args:
        clock: seconds since 1970.
        vault: knows how long reading takes.
    """

    def __init__(
        self,
        rule: EvictionPolicy,
        clock: Callable[[], float],
        purse: DeviceReservations,
        vault: DiskTier,
    ) -> None:
        self._rule, self._now, self._purse, self._vault = rule, clock, purse, vault
        self._clocks: dict[Tier, float] = {}

    def clock(self, tier: Tier) -> float:
        """Of a rule that ages what is not used; who is used now gets it."""
        return self._clocks.get(tier, 0.0)

    def first(
        self,
        tier: Tier,
        held: Iterable[SessionState],
        but: SessionState | None,
        missing: int,
        tenant: str | None = None,
    ) -> list[SessionState]:
        """Who leaves for so many bytes; nobody who is running, or is being written."""
        idle = [each for each in held if not (each.is_running or each.is_saving)]
        idle = [each for each in idle if each is not but]
        idle = [each for each in idle if tenant in (None, each.tenant)]
        told = CandidateColumns.of([self._candidate(each) for each in idle])
        leaving = self._rule.leaving(told, self._now(), missing)
        self._clocks[tier] = max(self.clock(tier), leaving.clock)
        return [idle[row] for row in leaving.rows]

    def _candidate(self, sitting: SessionState) -> Candidate:
        parked = sitting.host_bytes if sitting.is_in_memory else 0
        return Candidate(
            name=str(sitting.key),
            bytes=max(1, self._purse.bytes_of(sitting.key) + parked),
            seconds=self._vault.seconds_to_read(len(sitting.read)),
            last_used=sitting.last_used,
            uses=sitting.uses,
            clock=sitting.clock,
            session=str(sitting.key),
            pinned_until=FOREVER if sitting.is_pinned else -FOREVER,
            steps=sitting.steps,
            pauses=tuple(sitting.pauses),
        )


def can_unload(sitting: SessionState, family: Iterable[SessionState]) -> bool:
    """Whether a session may leave memory with all that began as it did: the store has all of them,
    and none that is pinned goes with one that is not."""
    others = [each for each in family if each is not sitting]
    if any(each.is_in_memory or not each.is_safe for each in others):
        return False
    return sitting.is_pinned or not any(each.is_pinned for each in others)
