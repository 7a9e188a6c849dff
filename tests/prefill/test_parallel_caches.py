"""Number of caches prefilled together: as requested, or as many as fit in memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from larder import Policy
from larder.core import BadParameter
from larder.models import Decoder, wrap_model
from larder.prefill import Blockwise, Episodic, PrefillReader, Together, no_progress
from larder.prefill.schedules import episodic
from model_runs import some_ids
from tiny_models import tiny

EPICACHE = 'patched(prompt="episode") > sensitivity()'
PROTECTED = f"protect(sinks=1, recent=2) > {EPICACHE}"
TOKENS, BLOCK, LANES = 14, 9, 5


class Sizes(list[int]):
    """Number of lanes of each settlement during a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reading = PrefillReader.read_and_evict_steps

        def spy(reader: PrefillReader, lanes: Any, *rest: Any) -> Any:
            self.append(len(lanes))
            return reading(reader, lanes, *rest)

        monkeypatch.setattr(PrefillReader, "read_and_evict_steps", spy)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    return Sizes(monkeypatch)


@pytest.fixture(scope="module")
def watched() -> Decoder:
    """Two layers; nothing need be remembered of what they read."""
    return wrap_model(tiny("qwen3", layers=2))


@pytest.fixture(scope="module")
def read(watched, reader_for, lane_for) -> Any:
    """The lanes that a schedule leaves, and the meter."""

    def run(schedule: Any, lanes: int = LANES, sentence: str = EPICACHE) -> Any:
        planner = Policy.parse(f"protect(sinks=1, recent=2) > {sentence}").planner
        reader = reader_for(watched, planner, TOKENS, 50)
        built = [lane_for(watched, episode=some_ids(3 + n, seed=n)) for n in range(lanes)]
        schedule.read(reader, built, some_ids(50), no_progress)
        return built, reader.meter

    return run


@pytest.fixture(scope="module")
def blockwise(read) -> Any:
    """Caches that the blockwise schedule builds under a policy."""
    return cache(lambda sentence: read(Blockwise(BLOCK), sentence=sentence))


def assert_same(one: Any, other: Any, within: float) -> None:
    for left, right in zip(one, other, strict=True):
        mine, its = left.cache.state(), right.cache.state()
        assert left.cache.meta() == right.cache.meta()
        for name in mine:
            torch.testing.assert_close(mine[name], its[name], atol=within, rtol=0)


@pytest.mark.extended
@pytest.mark.parametrize(
    "sentence, together",
    [
        *((EPICACHE, together) for together in (1, 3, *Together)),
        *(("keydiff() > global()", together) for together in (3, Together.ALL)),
    ],
)
def test_any_parallelism_equals_blockwise(read, blockwise, together, sentence) -> None:
    one, _ = blockwise(sentence)
    other, _ = read(Episodic(BLOCK, together), sentence=sentence)
    assert_same(one, other, 1e-4)


@pytest.mark.parametrize("together, expected", [(2, {1, 2}), (3, {2, 3}), (40, {5})])
def test_number_limits_caches_prefilled_together(read, sizes, together, expected) -> None:
    read(Episodic(BLOCK, together))
    assert set(sizes) == expected
    assert len(sizes) == -(-LANES // together) * 6  # blocks


def test_all_caches_are_prefilled_together_on_request(read, sizes) -> None:
    read(Episodic(BLOCK, Together.ALL))
    assert set(sizes) == {LANES}


@pytest.mark.extended
def test_cpu_prefills_caches_sequentially(read, blockwise, sizes) -> None:
    assert episodic.free_device_bytes(torch.device("cpu")) is None
    one, held = blockwise(EPICACHE)
    sizes.clear()
    other, also = read(Policy.parse("epicache").with_sizes(TOKENS, BLOCK).schedule)
    assert set(sizes) == {1}
    assert_same(one, other, 0)
    assert (also.peak_bytes, also.peak_entries) == (held.peak_bytes, held.peak_entries)
    _, more = read(Policy.parse("epicache_batched").with_sizes(TOKENS, BLOCK).schedule)
    assert more.peak_entries > 2 * held.peak_entries


@pytest.mark.parametrize("fit", [0, 2, 3, 100])
def test_parallel_caches_are_limited_by_free_memory(
    watched, reader_for, lane_for, read, sizes, monkeypatch, fit
) -> None:
    reader = reader_for(watched, Policy.parse(PROTECTED).planner, TOKENS, 50)
    longest, ids = lane_for(watched, episode=some_ids(3 + LANES - 1)), some_ids(50)
    each = episodic.cache_bytes(reader, longest, ids, BLOCK)
    each += episodic.activation_bytes(reader, longest, ids[:BLOCK])
    free = int(fit * each / episodic.USABLE_FRACTION) + 1
    monkeypatch.setattr(episodic, "free_device_bytes", lambda device: free)
    read(Episodic(BLOCK))
    most = max(1, min(fit, LANES))
    assert max(sizes) == -(-LANES // -(-LANES // most))
    assert len(sizes) == -(-LANES // most) * 6


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
@pytest.mark.parametrize("total", [150, 400])
def test_cache_bytes_stay_within_the_estimate(reader_for, lane_for, architecture, total) -> None:
    decoder, ids = wrap_model(tiny(architecture, layers=4)), some_ids(total)
    tokens, block = 100, 80  # larger than the slack that storage grows by
    sentence = "protect(sinks=1, recent=2) > keydiff() > uniform()"
    reader = reader_for(decoder, Policy.parse(sentence).planner, tokens, total)
    lane = lane_for(decoder)
    bound = episodic.cache_bytes(reader, lane, ids, block)
    Episodic(block).read(reader, [lane], ids, no_progress)
    assert bound / 2 < reader.meter.peak_bytes <= bound


def test_activation_bytes_grow_with_the_longest_prompt(watched, reader_for, lane_for) -> None:
    reader = reader_for(watched, Policy.parse(PROTECTED).planner, TOKENS, 50)
    short, long = (lane_for(watched, episode=some_ids(n)) for n in (3, 300))
    block = some_ids(BLOCK)
    assert episodic.activation_bytes(
        reader, long, block
    ) * BLOCK == 300 * episodic.activation_bytes(reader, short, block)


def test_free_memory_counts_what_the_allocator_holds_unused(monkeypatch) -> None:
    result = {"mem_get_info": (100, 1000), "memory_reserved": 60, "memory_allocated": 20}
    for name, value in result.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert episodic.free_device_bytes(torch.device("cuda")) == 140
    assert episodic.free_device_bytes(torch.device("meta")) is None


def test_activation_bytes_without_a_prompt_equal_those_of_a_short_one(
    watched, reader_for, lane_for
) -> None:
    plain = reader_for(watched, Policy.parse("keydiff() > uniform()").planner, 50, 50)
    asked = reader_for(watched, Policy.parse(PROTECTED).planner, 50, 50)
    lane, block = lane_for(watched, episode=some_ids(3)), some_ids(BLOCK)
    assert (
        episodic.activation_bytes(plain, lane, block)
        == episodic.activation_bytes(asked, lane, block)
        > 0
    )


@pytest.mark.parametrize("together", [0, -1])
def test_no_cache_at_all_is_refused(together) -> None:
    with pytest.raises(BadParameter, match='at least 1 cache, "fitting" or "all"'):
        Episodic(BLOCK, together)


@pytest.mark.gpu
def test_accelerator_reports_free_bytes() -> None:
    free = episodic.free_device_bytes(torch.device("cuda"))
    assert free is not None and free > 0
