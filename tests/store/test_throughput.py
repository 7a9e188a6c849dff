"""Throughput estimates: loading a cache against recomputing it."""

from __future__ import annotations

import pytest

from larder.core import BadParameter
from larder.store import PROBE_INTERVAL, RestorePath, ThroughputEstimates, Tier


def test_unmeasured_tier_is_loaded() -> None:
    rates = ThroughputEstimates()
    assert rates.choose(Tier.DISK, 10**9, 1) is RestorePath.LOAD
    rates.read(1000, 1.0)
    assert rates.choose(Tier.DISK, 10**9, 1) is RestorePath.LOAD
    assert rates.load_seconds(Tier.DISK, 1) is None


@pytest.mark.failure(number=26)
def test_recompute_is_chosen_when_loading_is_slower() -> None:
    rates = ThroughputEstimates()
    rates.read(1000, 1.0)
    rates.loaded(Tier.DISK, 10**6, 1.0)
    rates.loaded(Tier.HOST, 10**9, 1.0)
    assert rates.choose(Tier.DISK, 10**6, 999) is RestorePath.RECOMPUTE
    assert rates.choose(Tier.DISK, 10**6, 1001) is RestorePath.LOAD
    assert rates.choose(Tier.HOST, 10**6, 999) is RestorePath.LOAD


@pytest.mark.failure(number=26)
def test_slow_tier_is_measured_again() -> None:
    rates = ThroughputEstimates()
    rates.read(1000, 1.0)
    rates.loaded(Tier.DISK, 10, 1.0)
    ways = [rates.choose(Tier.DISK, 1000, 1) for _ in range(2 * PROBE_INTERVAL)]
    assert ways.count(RestorePath.LOAD) == 2


def test_later_measurements_weigh_more() -> None:
    rates = ThroughputEstimates(weight=0.5)
    rates.read(100, 1.0)
    rates.read(300, 1.0)
    assert rates.prefill_seconds(200) == pytest.approx(1.0)
    for amount, seconds in ((0, 1.0), (5, 0.0), (5, float("inf")), (5, -1.0)):
        rates.read(amount, seconds)
    assert rates.prefill_seconds(200) == pytest.approx(1.0)
    with pytest.raises(BadParameter):
        ThroughputEstimates(weight=0.0)
