"""Eviction of a decode step in one call: the same entries, bit for bit, as by plans."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch

import larder.prefill.decode_eviction as decode_eviction
from larder import Policy
from larder.cache import SequenceCache, storage_bytes
from larder.core import Plan
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import wrap_model
from larder.ops import EvictionTable, c_library
from larder.prefill import DeferredObserver, PeakMemoryMeter, StepEviction
from larder.session import build_caches, decode_planner
from model_runs import id_runtime, some_ids
from tensor_memory import reachable_tensors
from tiny_models import tiny

H2O = "protect(sinks=0, recent=0.5) > column_mass() > uniform() > every_step()"
D2O = "protect(sinks=4, recent=0.25) > column_mass() > inverse_variance() > fold_ema() > "
TOVA = "protect(sinks=0, recent=0) > last_query() > uniform() > "
ROCO = "protect(sinks=0, recent=4) > roco() > uniform() > "
CAM = "protect(sinks=4, recent=0) > sinks_and_window() > uniform() > "
LAGGED_H2O = H2O.replace("every_step()", "lagged(tokens=3)")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
CASES = [
    *((dtype, f"whole() > {H2O}") for dtype in (FLOAT32, BFLOAT16)),
    (FLOAT32, f"whole() > {LAGGED_H2O}"),
    *((dtype, f"whole() > {D2O}every_step()") for dtype in (FLOAT32, BFLOAT16)),
    (BFLOAT16, f"whole() > {D2O}lagged(tokens=2)"),
    (BFLOAT16, f"whole() > {TOVA}every_step()"),
    (FLOAT32, f"blockwise(tokens=16) > {ROCO}every_step()"),
    (BFLOAT16, f"blockwise(tokens=16) > {ROCO}lagged(tokens=3)"),
    (BFLOAT16, f"whole() > {CAM}cam(window=5, seed=7) > every_step()"),
    (FLOAT32, f'whole() > {CAM}cam(merge="expected") > lagged(tokens=2)'),
    (FLOAT32, f"whole() > {TOVA}cam() > every_step()"),
    (FLOAT32, f"whole() > {CAM}every_step()"),
]
STEPS = 30


def generated(sentence: str, dtype: torch.dtype) -> tuple[list[int], SequenceCache]:
    """Tokens behind a prompt, and the cache."""
    policy = Policy.parse(sentence).with_sizes(20, None)
    decoder = wrap_model(tiny("qwen3", layers=3).to(dtype))
    runtime = id_runtime(decoder)
    cache = build_caches(runtime, policy, some_ids(48), [{}], PeakMemoryMeter()).activate(0)
    planner = decode_planner(runtime, policy, [cache])
    stop = StoppingCriteria(STEPS)
    made = generate(
        decoder, [cache], [some_ids(1)], SamplingParams(), stop, make_observer=planner.observer
    )
    return [int(token) for row in made for token in row], cache


def same_caches(one: SequenceCache, other: SequenceCache) -> bool:
    state, kept = one.state(), other.state()
    return state.keys() == kept.keys() and all(
        torch.equal(own.nan_to_num(nan=7.0), kept[name].nan_to_num(nan=7.0))
        for name, own in state.items()
    )


def by_plans(observer: Any, calls: int, *rest: Any) -> DeferredObserver:
    del rest
    return DeferredObserver(observer, calls)


@pytest.mark.extended
@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
@pytest.mark.parametrize("dtype, sentence", CASES)
def test_eviction_kernel_equals_plans(
    sentence: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: list[int] = []
    laid_out: list[bool] = []

    def counted(self: StepEviction, layouts: Any = ()) -> set[tuple[int, int]]:
        done = run(self, layouts)
        kernel.append(len(done))
        laid_out.append(bool(layouts))
        return done

    run = StepEviction.run
    monkeypatch.setattr(StepEviction, "run", counted)
    tokens, cache = generated(sentence, dtype)
    assert kernel and min(kernel) == 3
    assert laid_out.count(True) >= STEPS - 1

    monkeypatch.setattr(decode_eviction, "DeferredObserver", by_plans)
    expected, reference = generated(sentence, dtype)
    assert tokens == expected
    assert same_caches(cache, reference)
    assert cache.nbytes == reference.nbytes and cache.lengths() == reference.lengths()


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
@pytest.mark.parametrize("sentence", [f"whole() > {H2O}", f"whole() > {D2O}every_step()"])
def test_layer_skipped_by_the_kernel_uses_its_plan(
    sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    evict, left = EvictionTable.evict, list[int | None]()

    def without_one(self: EvictionTable, roomy: int) -> list[int | None]:
        self._rows[1, self.COUNT] = 0  # more entries than it rejects
        rooms = evict(self, roomy)
        left.append(rooms[1])
        return rooms

    monkeypatch.setattr(EvictionTable, "evict", without_one)
    tokens, cache = generated(sentence, BFLOAT16)
    assert left and set(left) == {None}
    monkeypatch.setattr(decode_eviction, "DeferredObserver", by_plans)
    expected, reference = generated(sentence, BFLOAT16)
    assert tokens == expected and same_caches(cache, reference)
    assert cache.nbytes == reference.nbytes


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
def test_fork_and_source_continue_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    def continued(cache: SequenceCache, ids: tuple[int, ...]) -> list[list[int]]:
        return generate(
            decoder,
            [cache],
            [ids],
            SamplingParams(),
            StoppingCriteria(6),
            make_observer=decode_planner(runtime, policy, [cache]).observer,
        )

    policy = Policy.parse(f"whole() > {H2O}").with_sizes(20, None)
    decoder = wrap_model(tiny("qwen3", layers=3))
    runtime = id_runtime(decoder)
    found = list[tuple[list[list[int]], list[list[int]], SequenceCache, SequenceCache]]()
    for observer in (DeferredObserver, by_plans):
        monkeypatch.setattr(decode_eviction, "DeferredObserver", observer)
        cache = build_caches(runtime, policy, some_ids(48), [{}], PeakMemoryMeter()).activate(0)
        continued(cache, some_ids(1))
        fork = cache.fork()
        found.append((continued(cache, (3,)), continued(fork, (4,)), cache, fork))
    (one, two, cache, fork), (first, second, source, other) = found
    assert (one, two) == (first, second)
    assert same_caches(cache, source) and same_caches(fork, other)


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
@pytest.mark.parametrize("ending", ["every_step()", "lagged(tokens=5)"])
def test_step_layout_releases_logits(ending: str) -> None:
    _, cache = generated(f"whole() > {H2O.replace('every_step()', ending)}", FLOAT32)
    layout = cache.step_layout(FLOAT32)
    assert layout is not None and storage_bytes(reachable_tensors(cache)) == cache.nbytes


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
def test_step_layout_is_invalidated_by_plans() -> None:
    _, cache = generated(f"whole() > {H2O}", FLOAT32)
    layout = cache.step_layout(FLOAT32)
    assert layout is not None and layout is cache.step_layout(FLOAT32) and layout.is_current
    assert cache.step_layout(BFLOAT16) is None
    held = ref(cache.layers[1].entries().keys)
    lengths = cache.lengths()[1]
    cache.apply(1, Plan(torch.arange(sum(lengths)), lengths))
    assert not layout.is_current and held() is None
    assert cache.step_layout(FLOAT32) is not layout
