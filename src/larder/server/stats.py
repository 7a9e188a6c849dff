"""Statistics of the server: requests, prefix cache hits, preemptions, bytes of tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from larder.server.engine_core import EngineCore
from larder.server.request_finisher import SUMMED_FIELDS
from larder.server.session_info import session_status
from larder.store.ledger import UNLIMITED, Tier

TIERS = (Tier.DEVICE, Tier.HOST)


@dataclass(frozen=True)
class ServerStats:
    """Counters since the start of the server, and gauges of its present state.

    Args:
        sessions: number of sessions by state.
        tier_bytes: bytes in use or reserved, by tier.
        budget_bytes: capacity by tier; tiers without a limit are missing.
        peak_bytes: highest value of `tier_bytes` so far.
        budget_violations: times that a cache exceeded its reservation; 0 unless there is a bug.
        running, waiting: requests.
        done: finished requests by reason: `stop`, `length`, `cancelled`, `error`.
        refused: rejected requests by error code.
        passed_over: sessions that might match a request but could not be loaded, by error code.
        restarted: sessions with a damaged stored transcript, restarted from the text of a
            request.
        steps: decode steps.
        blocks: prefill blocks.
        preemptions: running requests that gave up their memory to one that comes first.
        prompt_tokens, cached_tokens, restored_tokens, recomputed_tokens, new_tokens,
            evicted_tokens, merged_tokens: sums over the reports of all requests.
        parked, restored: caches moved to and from slower tiers, by tier.
        rejected: stored sessions and caches that could not be used, by reason.
        unwritten: turns, caches and pins that the store did not accept, by reason.
        written_bytes: bytes written to disk.
        turns_not_durable: completed turns that the store did not accept, by reason.
        sessions_not_durable: sessions with turns that only memory has at present.
    """

    sessions: Mapping[str, int] = field(default_factory=dict)
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    budget_bytes: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    budget_violations: int = 0
    running: int = 0
    waiting: int = 0
    done: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    passed_over: Mapping[str, int] = field(default_factory=dict)
    restarted: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    blocks: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    new_tokens: int = 0
    evicted_tokens: int = 0
    merged_tokens: int = 0
    parked: Mapping[str, int] = field(default_factory=dict)
    restored: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    unwritten: Mapping[str, int] = field(default_factory=dict)
    written_bytes: int = 0
    turns_not_durable: Mapping[str, int] = field(default_factory=dict)
    sessions_not_durable: int = 0


def collect_stats(core: EngineCore) -> ServerStats:
    """Statistics of an engine core at this moment. On the model's thread."""
    scheduler, ledger, tiers = core.scheduler, core.ledger, core.tiers
    finisher = scheduler.finisher
    disk = tiers.disk.stats()
    used = {tier.value: ledger.used(tier) for tier in TIERS}
    limits = {tier.value: ledger.limit(tier) for tier in TIERS}
    limits = {name: count for name, count in limits.items() if count < UNLIMITED}
    return ServerStats(
        sessions=dict(Counter(map(session_status, core.sessions))),
        tier_bytes={**used, **disk.used},
        budget_bytes={**limits, **disk.budget},
        peak_bytes={Tier.DEVICE.value: core.reservations.peak},
        budget_violations=core.reservations.violations,
        running=len(scheduler.running) + len(finisher.finishing),
        waiting=len(scheduler.queue),
        done=dict(finisher.done),
        refused=core.refused.counts(),
        passed_over=core.restorer.passed_over.counts(),
        restarted=core.restorer.restarted.counts(),
        steps=scheduler.steps,
        blocks=scheduler.blocks,
        preemptions=scheduler.preemptions,
        **{name: finisher.sums[name] for name in SUMMED_FIELDS},
        parked=dict(tiers.parked),
        restored=dict(+tiers.restored),
        rejected=disk.rejected,
        unwritten=disk.unwritten,
        written_bytes=disk.written_bytes,
        turns_not_durable=dict(core.unwritten.counts),
        sessions_not_durable=len(core.unwritten),
    )


def sum_stats(stats: Sequence[ServerStats]) -> ServerStats:
    """Statistics of several engine clients, summed."""
    if not stats:
        return ServerStats()
    return ServerStats(
        **{f.name: _sum([getattr(each, f.name) for each in stats]) for f in fields(ServerStats)}
    )


def _sum(values: Sequence[Any]) -> Any:
    if any(isinstance(value, Mapping) for value in values):
        total: Counter[str] = Counter()
        for value in values:
            total.update(value)
        return dict(total)
    return sum(values)
