"""What was said, in host memory: charged like all else there, and gone when it need not stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from larder.server.session_state import SessionState
from larder.store.ledger import ByteLedger, Tier

MAX_IDLE_TRANSCRIPTS = (
    64  # sessions without a cache whose logs are in memory, because they were used lately
)


class TranscriptMemory:
    """The logs of all sessions that are in memory. For the model's thread.

    Args:
        unload: has a session of which nothing need be in memory leave it, if that can be.
    """

    def __init__(self, ledger: ByteLedger, unload: Callable[[SessionState], bool]) -> None:
        self._ledger, self._unload = ledger, unload
        self._charged: dict[int, SessionState] = {}
        self._staying: dict[int, int] = {}
        self._of: Counter[str] = Counter()

    def missing(self, sitting: SessionState) -> int:
        """Bytes that a log takes beyond what was charged for it."""
        return sitting.log_bytes - (0 if sitting.log is None else sitting.log.bytes)

    def crowds(self, sitting: SessionState) -> bool:
        """Whether a tenant would have more that cannot leave memory than is left to others."""
        if not self._is_crowding(sitting):
            return False
        for each in self._charged.values():
            if each.written:  # since it was charged
                self._count(each, 0)
        return self._is_crowding(sitting)

    def charge(self, sitting: SessionState) -> None:
        """Charge what a log takes now.

        Raises:
            BudgetError: there is no room.
        """
        want, had = sitting.log_bytes, sitting.log
        more = self._ledger.reserve(Tier.HOST, sitting.tenant, max(0, self.missing(sitting)))
        if had is None:
            sitting.log = more
        else:
            had.bytes += more.bytes
            had.shrink(want)
        self._charged[sitting.key] = sitting
        self._count(sitting, self._kept_here(sitting))

    def forget(self, sitting: SessionState) -> None:
        """It is not in memory any more."""
        self._charged.pop(sitting.key, None)
        self._count(sitting, 0)
        if sitting.log is not None:
            sitting.log.release()
            sitting.log = None

    def tidy(self) -> None:
        """Have sessions without a cache in memory leave it, but for some that were used last."""
        resting = [each for each in self._resting() if not each.is_pinned]
        for each in resting[: max(0, len(resting) - MAX_IDLE_TRANSCRIPTS)]:
            self._unload(each)

    def shed(self, but: SessionState) -> bool:
        """Have one of these leave memory, the one that was used least lately, those that are pinned
        last; whether one could."""
        return any(self._unload(each) for each in self._resting() if each is not but)

    def _is_crowding(self, sitting: SessionState) -> bool:
        more = self._kept_here(sitting) - self._staying.get(sitting.key, 0)
        own, held = self._of[sitting.tenant] + more, self._of.total() + more
        return more > 0 and own > self._ledger.limit(Tier.HOST) - held

    def _kept_here(self, sitting: SessionState) -> int:
        return 0 if sitting.written else sitting.log_bytes

    def _count(self, sitting: SessionState, staying: int) -> None:
        self._of[sitting.tenant] += staying - self._staying.pop(sitting.key, 0)
        if staying:
            self._staying[sitting.key] = staying
        if not self._of[sitting.tenant]:
            del self._of[sitting.tenant]

    def _resting(self) -> list[SessionState]:
        """Sessions of which the log alone is in memory, and need not be."""
        resting = [each for each in self._charged.values() if each.is_safe]
        resting = [each for each in resting if not each.is_in_memory]
        return sorted(resting, key=lambda each: (each.is_pinned, each.last_used))
