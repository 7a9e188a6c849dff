"""Every number of the server at one moment."""

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
    purse: DeviceReservations,
    tiers: TierManager,
    sittings: Iterable[SessionState],
    refused: Mapping[str, int],
    passed_over: Mapping[str, int],
    begun_again: Mapping[str, int],
    unwritten: WriteRetryQueue,
) -> ServerStats:
    """What the parts of a server have counted so far, and hold now."""
    limits = {tier.value: ledger.limit(tier) for tier in TIERS}
    sums, vault = scheduler.sums, tiers.vault
    return ServerStats(
        sessions=dict(Counter(map(session_status, sittings))),
        tier_bytes={tier.value: ledger.used(tier) for tier in TIERS} | vault.bytes_by_tier(),
        budget_bytes={name: count for name, count in limits.items() if count < UNLIMITED}
        | vault.budget_by_tier(),
        peak_bytes={Tier.DEVICE.value: purse.peak},
        budget_violations=purse.violations,
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
        rejected=dict(vault.rejected()),
        unwritten=dict(vault.unwritten()),
        written_bytes=vault.written_bytes(),
        turns_not_durable=dict(unwritten.counts),
        sessions_not_durable=len(unwritten),
    )


class ReasonCounter:
    """Since the server started. Safe from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def note(self, why: str) -> None:
        """Once more."""
        with self._lock:
            self._counts[why] += 1

    def told(self) -> dict[str, int]:
        """How often for each reason."""
        with self._lock:
            return dict(self._counts)
