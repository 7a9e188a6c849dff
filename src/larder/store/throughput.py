"""Measured throughput of loading and prefill, for the choice between load and recompute."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from enum import Enum
from typing import Any

from larder.core.arguments import require
from larder.store.ledger import Tier

PREFILL_KEY, AVOIDED_PREFIX = "reading", "avoided "  # keys in addition to the tiers' names
PROBE_INTERVAL = 16  # choices after which a slow tier is measured again


class RestorePath(Enum):
    """Way to restore a cache."""

    LOAD = "load"
    RECOMPUTE = "recompute"


class ThroughputEstimates:
    """Throughput estimates of loading and prefill. Safe from threads.

    While a tier is unmeasured its caches are loaded, which measures it. A tier that was slower than
    prefill is tried again once in `PROBE_INTERVAL` choices.

    Args:
        weight: weight of the newest measurement, in (0, 1].
    """

    def __init__(self, weight: float = 0.3) -> None:
        require(0 < weight <= 1, "rates.weight", "in (0, 1]", weight)
        self._weight = weight
        self._lock = threading.Lock()
        self._rates: dict[str, float] = {}  # per second, by `PREFILL_KEY` or name of the tier
        self._avoided: dict[str, int] = {}  # choices since a tier was measured

    def loaded(self, tier: Tier, count: int, seconds: float) -> None:
        """Record a load of `count` bytes, verification and decoding included."""
        self._measure(tier.value, count, seconds)

    def read(self, tokens: int, seconds: float) -> None:
        """Record a prefill of `tokens` tokens."""
        self._measure(PREFILL_KEY, tokens, seconds)

    def load_seconds(self, tier: Tier, count: int) -> float | None:
        """Estimated seconds to load; None if unknown."""
        return self._seconds(tier.value, count)

    def prefill_seconds(self, tokens: int) -> float | None:
        """Estimated seconds of prefill; None if unknown."""
        return self._seconds(PREFILL_KEY, tokens)

    def choose(self, tier: Tier, count: int, tokens: int) -> RestorePath:
        """Faster way to restore a cache.

        Args:
            count: bytes to be loaded.
            tokens: number of tokens to be prefilled otherwise.
        """
        load, read = self.load_seconds(tier, count), self.prefill_seconds(tokens)
        if load is None or read is None or load <= read:
            return RestorePath.LOAD
        with self._lock:
            avoided = (self._avoided.get(tier.value, 0) + 1) % PROBE_INTERVAL
            self._avoided[tier.value] = avoided
        return RestorePath.RECOMPUTE if avoided else RestorePath.LOAD

    def estimates(self) -> dict[str, float]:
        """All estimates, as initial values for another process."""
        with self._lock:
            avoided = {f"{AVOIDED_PREFIX}{name}": float(n) for name, n in self._avoided.items()}
            return self._rates | avoided

    def initialize(self, rates: Mapping[str, Any]) -> None:
        """Initialize unknown estimates from `rates`; invalid rates are ignored."""
        numbers = {n: float(r) for n, r in rates.items() if isinstance(r, (int, float))}
        valid = {name: rate for name, rate in numbers.items() if 0 < rate < math.inf}
        tiers = [tier.value for tier in Tier]
        with self._lock:
            for name in (PREFILL_KEY, *tiers):
                if name in valid:
                    self._rates.setdefault(name, valid[name])
            for name in tiers:
                avoided = int(valid.get(f"{AVOIDED_PREFIX}{name}", 0.0))
                self._avoided.setdefault(name, avoided % PROBE_INTERVAL)

    def _measure(self, name: str, amount: int, seconds: float) -> None:
        if amount <= 0 or not 0 < seconds < math.inf:
            return
        rate = amount / seconds
        with self._lock:
            former = self._rates.get(name, rate)
            self._rates[name] = former + self._weight * (rate - former)

    def _seconds(self, name: str, amount: int) -> float | None:
        with self._lock:
            rate = self._rates.get(name)
        return None if rate is None else amount / rate
