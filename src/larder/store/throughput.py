"""Measured throughput of loading and prefill, for the choice between load and recompute."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from larder.core.errors import BadParameter
from larder.store.ledger import Tier

PREFILL_KEY, AVOIDED_PREFIX = "reading", "avoided "  # keys in addition to the tiers' names
PROBE_INTERVAL = 16  # choices after which a slow tier is measured again


class RestorePath(Enum):
    """Way to restore a cache."""

    LOAD = "load"
    RECOMPUTE = "recompute"


@dataclass
class _Rate:
    """Exponentially weighted rate, in amounts per second."""

    per_second: float | None = None


class ThroughputEstimates:
    """Throughput estimates of loading and prefill. Safe from threads.

    While a tier is unmeasured its caches are loaded, which measures it. A tier that was slower than
    prefill is tried again once in `PROBE_INTERVAL` choices.

    Args:
        weight: weight of the newest measurement, in (0, 1].
    """

    def __init__(self, weight: float = 0.3) -> None:
        if not 0 < weight <= 1:
            raise BadParameter(f"rates.weight must be in (0, 1], got {weight}.")
        self._weight = weight
        self._lock = threading.Lock()
        self._loading: dict[Tier, _Rate] = {}
        self._avoided: dict[Tier, int] = {}
        self._reading = _Rate()

    def loaded(self, tier: Tier, count: int, seconds: float) -> None:
        """Record a load of `count` bytes, verification and decoding included."""
        with self._lock:
            self._note(self._loading.setdefault(tier, _Rate()), count, seconds)

    def read(self, tokens: int, seconds: float) -> None:
        """Record a prefill of `tokens` tokens."""
        with self._lock:
            self._note(self._reading, tokens, seconds)

    def load_seconds(self, tier: Tier, count: int) -> float | None:
        """Estimated seconds to load; None if unknown."""
        with self._lock:
            return _seconds(self._loading.get(tier, _Rate()), count)

    def prefill_seconds(self, tokens: int) -> float | None:
        """Estimated seconds of prefill; None if unknown."""
        with self._lock:
            return _seconds(self._reading, tokens)

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
            self._avoided[tier] = (self._avoided.get(tier, 0) + 1) % PROBE_INTERVAL
            return RestorePath.RECOMPUTE if self._avoided[tier] else RestorePath.LOAD

    def known(self) -> dict[str, float]:
        """All estimates, as initial values for another process."""
        with self._lock:
            rates = {PREFILL_KEY: self._reading, **{t.value: r for t, r in self._loading.items()}}
            known = {n: r.per_second for n, r in rates.items() if r.per_second is not None}
            avoided = {f"{AVOIDED_PREFIX}{t.value}": float(n) for t, n in self._avoided.items()}
            return known | avoided

    def know(self, known: Mapping[str, Any]) -> None:
        """Initialize unknown estimates from `known`; invalid rates are ignored."""
        numbers = {n: float(r) for n, r in known.items() if isinstance(r, (int, float))}
        rates = {name: rate for name, rate in numbers.items() if 0 < rate < math.inf}
        with self._lock:
            if self._reading.per_second is None:
                self._reading.per_second = rates.get(PREFILL_KEY)
            for tier in Tier:
                if tier.value in rates and tier not in self._loading:
                    self._loading[tier] = _Rate(rates[tier.value])
                avoided = rates.get(f"{AVOIDED_PREFIX}{tier.value}", 0.0)
                self._avoided.setdefault(tier, int(avoided) % PROBE_INTERVAL)

    def _note(self, rate: _Rate, amount: int, seconds: float) -> None:
        if amount <= 0 or not 0 < seconds < math.inf:
            return
        new = amount / seconds
        old = new if rate.per_second is None else rate.per_second
        rate.per_second = old + self._weight * (new - old)


def _seconds(rate: _Rate, amount: int) -> float | None:
    return None if rate.per_second is None else amount / rate.per_second
