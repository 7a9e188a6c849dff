"""MPCache's layers use what their neighbor found, with the preset as it is."""

from __future__ import annotations

import pytest

from larder import Policy
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import Decoder, wrap_model
from larder.prefill import PeakMemoryMeter
from larder.recall import MPCache
from larder.session import build_caches, decode_planner
from model_runs import id_runtime, some_ids
from tiny_models import tiny

LAYERS, TOKENS = 6, 160


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("qwen3", layers=LAYERS))


@pytest.mark.extended
def test_layers_after_the_first_two_share_in_pairs(decoder) -> None:
    policy = Policy.parse("mpcache").with_sizes(TOKENS, None)
    runtime = id_runtime(decoder)
    cache = build_caches(runtime, policy, some_ids(400), [{}], PeakMemoryMeter()).activate(0)
    tiers = cache.tiers
    leaders = [None if tier.leader is None else tiers.index(tier.leader) for tier in tiers]
    assert leaders == [None, None, None, 2, None, 4]
    tending = decode_planner(runtime, policy, [cache])
    assert tending is not None
    prompt = some_ids(6, seed=1)
    generate(
        decoder,
        [cache],
        [prompt],
        SamplingParams(),
        StoppingCriteria(20),
        make_observer=tending.observer,
    )
    assert cache.pages[0] > 0
    # Who uses what another found needs no index as long as the same tokens are parked.
    assert [tier.fetcher.shared_index.is_used for tier in tiers] == [
        leader is None for leader in leaders
    ]
    for first in (2, 4):
        left, right = tiers[first].parked(), tiers[first + 1].parked()
        assert left.lengths == right.lengths and left.lengths[0] > 100
        assert left.packed_positions().tolist() == right.packed_positions().tolist()


def test_pairs_start_after_the_unshared_layers() -> None:
    assert [MPCache().leader_of(index) for index in range(7)] == [0, 1, 2, 2, 4, 4, 6]
    assert [MPCache(alone=1).leader_of(index) for index in range(5)] == [0, 1, 1, 3, 3]
    assert [MPCache(layers=1).leader_of(index) for index in range(4)] == [0, 1, 2, 3]
