"""Timing of alternating cases: median and 95th percentile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def interleaved(
    cases: Mapping[str, Callable[[], object]], rounds: int, warmups: int = 1
) -> dict[str, list[float]]:
    """Seconds of each case, `rounds` times; cases alternate so that drift affects all equally."""
    for _ in range(warmups):
        for run in cases.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
    }
