"""Eviction of a decode step in one call: the same entries, bit for bit, as by plans."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch

import larder.ops.cpu.decode_eviction as kernels
import larder.prefill.decode_eviction as decode_eviction
from larder import Policy
from larder.cache import SequenceCache, step_layout, storage_bytes
from larder.core import Plan
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import JoinedObserver, StepLayouts, wrap_model
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


def use_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evict by one plan for each layer and sequence from here on, not by a kernel or together."""

    def by_plans(observer: Any, calls: int, *rest: Any) -> DeferredObserver:
        del rest
        return DeferredObserver(observer, calls)

    monkeypatch.setattr(decode_eviction, "DeferredObserver", by_plans)
    monkeypatch.setattr(decode_eviction.DecodeEviction, "_batch_plan", lambda self, caches: None)


@pytest.mark.extended
@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
@pytest.mark.parametrize("dtype, sentence", CASES)
def test_eviction_kernel_equals_plans(
    sentence: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: list[int] = []
    laid_out: list[bool] = []

    def counted(self: StepEviction) -> set[tuple[int, int]]:
        done = run(self)
        kernel.append(len(done))
        laid_out.append(False)
        return done

    def counted_by_layouts(evictions: Any) -> list[list[int]]:
        done = evict_sequences(evictions)
        kernel.extend(map(len, done))
        laid_out.append(True)
        return done

    def counted_behind_layers(evictions: Any) -> list[list[int]]:
        done = count_evictions(evictions)
        kernel.extend(map(len, done))
        laid_out.append(True)
        return done

    run, evict_sequences = StepEviction.run, step_layout.evict_sequences
    count_evictions = step_layout.count_evictions
    monkeypatch.setattr(StepEviction, "run", counted)
    monkeypatch.setattr(step_layout, "evict_sequences", counted_by_layouts)
    monkeypatch.setattr(step_layout, "count_evictions", counted_behind_layers)
    tokens, cache = generated(sentence, dtype)
    assert kernel and min(kernel) == 3
    assert laid_out.count(True) >= STEPS - 1

    use_plans(monkeypatch)
    expected, reference = generated(sentence, dtype)
    assert tokens == expected
    assert same_caches(cache, reference)
    assert cache.nbytes == reference.nbytes and cache.lengths() == reference.lengths()


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
@pytest.mark.parametrize("sentence", [f"whole() > {H2O}", f"whole() > {D2O}every_step()"])
def test_layer_skipped_by_the_kernel_uses_its_plan(
    sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms_of, left = EvictionTable.rooms, list[int | None]()

    class WithoutOne(EvictionTable):
        def set_step(self, *given: Any) -> None:
            super().set_step(*given)
            self.rows[1, kernels.COUNT] = 0  # more entries than it rejects

        def rooms(self) -> list[int | None]:
            left.append(rooms_of(self)[1])
            return rooms_of(self)

    monkeypatch.setattr(kernels, "EvictionTable", WithoutOne)
    tokens, cache = generated(sentence, BFLOAT16)
    assert left and set(left) == {None}
    use_plans(monkeypatch)
    expected, reference = generated(sentence, BFLOAT16)
    assert tokens == expected and same_caches(cache, reference)
    assert cache.nbytes == reference.nbytes


def evict_behind_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evict in a call behind the step from here on, not behind the attention of each layer."""
    monkeypatch.setattr(StepLayouts, "plan_evictions", lambda self, observer: None)


BATCHES = [
    (BFLOAT16, [H2O] * 3),
    (FLOAT32, [f"{D2O}every_step()"] * 4),
    (BFLOAT16, [f"{CAM}every_step()", f"{TOVA}every_step()", f"{CAM}every_step()"]),
    (
        FLOAT32,
        [H2O, f"{D2O}lagged(tokens=2)", f"{CAM}cam(window=5) > every_step()", LAGGED_H2O, H2O],
    ),
]


def batch_generated(endings: list[str], dtype: torch.dtype) -> tuple[Any, list[SequenceCache]]:
    """Tokens behind prompts of different lengths, each under its own policy, and the caches."""
    decoder = wrap_model(tiny("qwen3", layers=3).to(dtype))
    runtime, caches, planners = id_runtime(decoder), list[SequenceCache](), list[Any]()
    for number, ending in enumerate(endings):
        policy = Policy.parse(f"whole() > {ending}").with_sizes(20 + 3 * number, None)
        ids = some_ids(48 - 5 * number)
        caches.append(build_caches(runtime, policy, ids, [{}], PeakMemoryMeter()).activate(0))
        planners.append(decode_planner(runtime, policy, [caches[-1]]))

    def observer(numbers: list[int], segments: list[Any], steps: list[int]) -> JoinedObserver:
        own = [
            planners[number].observer([0], [segment], [step])
            for number, segment, step in zip(numbers, segments, steps, strict=True)
        ]
        return JoinedObserver(dict(enumerate(own)))

    firsts = [(3 + number,) for number in range(len(endings))]
    stop = StoppingCriteria(STEPS)
    return generate(decoder, caches, firsts, SamplingParams(), stop, make_observer=observer), caches


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
@pytest.mark.parametrize("dtype, endings", BATCHES)
def test_eviction_of_several_sequences_equals_that_of_each_alone(
    endings: list[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[list[int]]()  # sequences in each call, by step
    evict_alike, evict_sequences = kernels._evict_alike, step_layout.evict_sequences

    def counted(tables: list[EvictionTable], roomy: int) -> list[list[int | None]]:
        sizes[-1].append(len(tables))
        return evict_alike(tables, roomy)

    def one_step(evictions: Any) -> list[list[int]]:
        sizes.append([])
        return evict_sequences(evictions)

    evict_behind_step(monkeypatch)
    monkeypatch.setattr(kernels, "_evict_alike", counted)
    monkeypatch.setattr(step_layout, "evict_sequences", one_step)
    tokens, caches = batch_generated(endings, dtype)
    kinds = [endings.count(each) for each in dict.fromkeys(endings)]
    if LAGGED_H2O in endings:  # the same rule, less often
        kinds = [3, 1, 1]
    assert kinds in sizes and all(len(calls) <= len(kinds) for calls in sizes)
    assert len(sizes) >= STEPS - 1

    def one_by_one(evictions: Any) -> list[list[int]]:
        return [evict_sequences([each])[0] for each in evictions]

    monkeypatch.setattr(step_layout, "evict_sequences", one_by_one)
    expected, references = batch_generated(endings, dtype)
    assert tokens == expected
    assert all(map(same_caches, caches, references))
    assert [own.nbytes for own in caches] == [own.nbytes for own in references]
    assert [own.lengths() for own in caches] == [own.lengths() for own in references]


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
def test_layer_skipped_in_a_batch_uses_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    evict, left = kernels.evict_tables, list[list[int | None]]()

    def without_one(tables: list[EvictionTable], roomy: int) -> list[list[int | None]]:
        tables[1].rows[2, kernels.COUNT] = 0  # more entries than it rejects
        rooms = evict(tables, roomy)
        left.append([own[2] for own in rooms])
        return rooms

    monkeypatch.setattr(kernels, "evict_tables", without_one)
    tokens, caches = batch_generated([H2O] * 3, BFLOAT16)
    assert left and all(one is not None and two is None for one, two, _ in left)
    use_plans(monkeypatch)
    expected, references = batch_generated([H2O] * 3, BFLOAT16)
    assert tokens == expected and all(map(same_caches, caches, references))


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
    for is_reference in (False, True):
        if is_reference:
            use_plans(monkeypatch)
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
