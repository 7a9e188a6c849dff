"""Eviction of a decode step in one call: the same entries, bit for bit, as by plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import larder.prefill.decode_eviction as decode_eviction
from larder import Policy
from larder.cache import SequenceCache
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import wrap_model
from larder.ops import c_library
from larder.prefill import DeferredObserver, PeakMemoryMeter, StepEviction
from larder.session import build_caches, decode_planner
from model_runs import id_runtime, some_ids
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


@pytest.mark.extended
@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
@pytest.mark.parametrize("dtype, sentence", CASES)
def test_a_kernel_leaves_what_plans_leave(
    sentence: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: list[int] = []

    def counted(self: StepEviction) -> set[tuple[int, int]]:
        done = run(self)
        kernel.append(len(done))
        return done

    run = StepEviction.run
    monkeypatch.setattr(StepEviction, "run", counted)
    tokens, cache = generated(sentence, dtype)
    assert kernel and min(kernel) == 3

    def by_plans(observer: Any, calls: int, evict: Any) -> DeferredObserver:
        del evict
        return DeferredObserver(observer, calls)

    monkeypatch.setattr(decode_eviction, "DeferredObserver", by_plans)
    expected, reference = generated(sentence, dtype)
    assert tokens == expected
    state, kept = cache.state(), reference.state()
    assert state.keys() == kept.keys()
    for name, own in state.items():
        assert torch.equal(own.nan_to_num(nan=7.0), kept[name].nan_to_num(nan=7.0)), name
    assert cache.nbytes == reference.nbytes and cache.lengths() == reference.lengths()
