"""Statistics of the server, collected from its parts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from larder.server.engine_client import ServerStats
from larder.server.persistence.retry_queue import WriteRetryQueue
from larder.server.scheduler import Scheduler
from larder.server.session_info import session_status
from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations
from larder.server.tiers.manager import TierManager
from larder.store.ledger import UNLIMITED, ByteLedger, Tier

TIERS = (Tier.DEVICE, Tier.HOST)


def collect_stats(
    scheduler: Scheduler,
    ledger: ByteLedger,
    reservations: DeviceReservations,
    tiers: TierManager,
    sessions: Iterable[SessionState],
    refused: Mapping[str, int],
    passed_over: Mapping[str, int],
    begun_again: Mapping[str, int],
    unwritten: WriteRetryQueue,
) -> ServerStats:
    """Statistics of all parts at one moment."""
    limits = {tier.value: ledger.limit(tier) for tier in TIERS}
    sums, disk = scheduler.sums, tiers.disk
    return ServerStats(
        sessions=dict(Counter(map(session_status, sessions))),
        tier_bytes={tier.value: ledger.used(tier) for tier in TIERS} | disk.bytes_by_tier(),
        budget_bytes={name: count for name, count in limits.items() if count < UNLIMITED}
        | disk.budget_by_tier(),
        peak_bytes={Tier.DEVICE.value: reservations.peak},
        budget_violations=reservations.violations,
        running=len(scheduler.running) + len(scheduler.finishing),
        waiting=len(scheduler.queue),
        done=dict(scheduler.done),
        refused=refused,
        passed_over=passed_over,
        begun_again=begun_again,
        steps=scheduler.steps,
        blocks=scheduler.blocks,
        prompt_tokens=sums["prompt_tokens"],
        cached_tokens=sums["cached_tokens"],
        restored_tokens=sums["restored_tokens"],
        recomputed_tokens=sums["recomputed_tokens"],
        new_tokens=sums["new_tokens"],
        evicted_tokens=sums["evicted_tokens"],
        merged_tokens=sums["merged_tokens"],
        parked=dict(tiers.parked),
        restored=dict(+tiers.restored),
        rejected=dict(disk.rejected()),
        unwritten=dict(disk.unwritten()),
        written_bytes=disk.written_bytes(),
        turns_not_durable=dict(unwritten.counts),
        sessions_not_durable=len(unwritten),
    )


class ReasonCounter:
    """Counter by reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def note(self, why: str) -> None:
        """Count one occurrence."""
        with self._lock:
            self._counts[why] += 1

    def counts(self) -> dict[str, int]:
        """Number of occurrences by reason."""
        with self._lock:
            return dict(self._counts)
