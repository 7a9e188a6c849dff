"""Evictions behind the attention of each layer, in the call that runs the layers.

They keep the entries that plans keep, bit for bit, and are undone where the step fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import larder.ops.cpu.decode_eviction as kernels
import larder.ops.cpu.decoder_layer as layer_kernels
from covering import covering
from larder import Policy
from larder.cache import SequenceCache
from larder.core import CacheError, Mode
from larder.models import BatchSegment, JoinedObserver, StepLayouts, wrap_model
from larder.ops import EvictionTable, c_library
from larder.prefill import PeakMemoryMeter
from larder.session import build_caches, decode_planner
from model_runs import id_runtime, some_ids
from prefill.test_step_eviction import (
    BFLOAT16,
    CAM,
    D2O,
    FLOAT32,
    H2O,
    LAGGED_H2O,
    ROCO,
    TOVA,
    same_caches,
    use_plans,
)
from tiny_models import tiny

pytestmark = pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")

RULES = [
    H2O,
    LAGGED_H2O,
    f"{D2O}every_step()",
    f"{D2O}lagged(tokens=3)",
    f"{TOVA}every_step()",
    f"{ROCO}every_step()",
]
NUM_STEPS = 9


class DecodeSteps:
    """Decode steps of sequences of one model, each under its own policy."""

    def __init__(self, endings: Sequence[str], dtype: torch.dtype) -> None:
        self._decoder = wrap_model(tiny("qwen3", layers=3).to(dtype))
        runtime = id_runtime(self._decoder)
        self.caches, self._planners = list[SequenceCache](), list[Any]()
        for number, ending in enumerate(endings):
            policy = Policy.parse(f"whole() > {ending}").with_sizes(20 + number, None)
            built = build_caches(
                runtime, policy, some_ids(48 - 7 * number, seed=number), [{}], PeakMemoryMeter()
            )
            self.caches.append(built.activate(0))
            self._planners.append(decode_planner(runtime, policy, [self.caches[-1]]))
        self._ends = [cache.next_position for cache in self.caches]

    def take(self, numbers: Sequence[int]) -> None:
        """Append a token to some of the sequences, in one pass."""
        segments, observers = list[BatchSegment](), list[Any]()
        for number in numbers:
            cache = self.caches[number]
            step = cache.next_position - self._ends[number]
            segment = BatchSegment(cache, (3 + (5 * step + number) % 100,))
            segments.append(segment)
            observers.append(self._planners[number].observer([0], [segment], [step]))
        observer = JoinedObserver(dict(enumerate(observers)))
        self._decoder.forward_logits(segments, Mode.APPEND, range(len(numbers)), observer)


def counted_plans(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each pass from here on evicts behind the attention of its layers."""
    plan, found = StepLayouts.plan_evictions, list[bool]()

    def counted(self: StepLayouts, observer: Any) -> Any:
        rows = plan(self, observer)
        found.append(rows is not None)
        return rows

    monkeypatch.setattr(StepLayouts, "plan_evictions", counted)
    return found


@pytest.mark.extended
@settings(max_examples=10, deadline=None)
@given(
    ending=st.sampled_from(RULES),
    dtype=st.sampled_from([FLOAT32, BFLOAT16]),
    batches=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
        min_size=4,
        max_size=NUM_STEPS,
    ),
)
def test_sequences_of_any_batches_equal_each_alone_by_plans(
    ending: str, dtype: torch.dtype, batches: list[list[int]]
) -> None:
    together, alone = (DecodeSteps([ending] * 4, dtype) for _ in range(2))
    for numbers in batches:
        together.take(numbers)
    with pytest.MonkeyPatch.context() as patch:
        use_plans(patch)
        for numbers in batches:
            for number in numbers:
                alone.take([number])
    assert all(map(same_caches, together.caches, alone.caches))
    assert [own.nbytes for own in together.caches] == [own.nbytes for own in alone.caches]


@pytest.mark.parametrize("ending", RULES)
def test_steps_of_one_rule_evict_behind_each_layer(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, behind_layers = DecodeSteps([ending] * 2, BFLOAT16), counted_plans(monkeypatch)
    for _ in range(NUM_STEPS):
        steps.take([0, 1])
    # A lagged policy changes between steps that evict and those that only record attention.
    assert sum(behind_layers) >= (2 if "lagged" in ending else NUM_STEPS - 1)


def test_steps_of_two_rules_evict_behind_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = DecodeSteps([H2O, f"{TOVA}every_step()"], BFLOAT16)
    behind_layers = counted_plans(monkeypatch)
    for _ in range(3):
        steps.take([0, 1])
    assert not any(behind_layers)


def test_layer_skipped_behind_its_attention_uses_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutOne(EvictionTable):
        num_steps = 0

        def set_step(self, *given: Any) -> None:
            super().set_step(*given)
            WithoutOne.num_steps += 1
            if WithoutOne.num_steps % 3 == 0:
                self.rows[1, kernels.COUNT] = 0  # more entries than it rejects

    expected, steps = DecodeSteps([H2O], BFLOAT16), DecodeSteps([H2O], BFLOAT16)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "EvictionTable", WithoutOne)
        behind_layers = counted_plans(patch)
        for _ in range(NUM_STEPS):
            steps.take([0])
    assert behind_layers[2] and behind_layers[5]  # steps in which the layer was skipped
    use_plans(monkeypatch)
    for _ in range(NUM_STEPS):
        expected.take([0])
    assert same_caches(steps.caches[0], expected.caches[0])


def fail_behind_the_call(patch: pytest.MonkeyPatch) -> None:
    """Interrupt the next step once its layers have run."""

    def interrupted(failed: int) -> None:
        raise KeyboardInterrupt

    patch.setattr(layer_kernels, "_check", interrupted)


def fail_between_layers(patch: pytest.MonkeyPatch) -> None:
    """Let the next step fail behind two of three layers, as for lack of memory."""
    kernel = layer_kernels._step_kernel

    def short_of_memory(dtype: torch.dtype) -> Callable[[Any], int]:
        def run(step: Any) -> int:
            step._obj.count = 2
            kernel(dtype)(step)
            return 1

        return run

    patch.setattr(layer_kernels, "_step_kernel", short_of_memory)


def fail_behind_the_layers(patch: pytest.MonkeyPatch) -> None:
    """Interrupt the next step behind its evictions and their counts."""
    finish = StepLayouts.finish

    def interrupted(self: StepLayouts, observer: Any) -> bool:
        finish(self, observer)
        raise KeyboardInterrupt

    patch.setattr(StepLayouts, "finish", interrupted)


FAILURES = [fail_behind_the_call, fail_between_layers, fail_behind_the_layers]


@pytest.mark.parametrize("ending, dtype, fail", covering(RULES, (FLOAT32, BFLOAT16), FAILURES))
def test_step_that_fails_leaves_caches_as_they_were(
    ending: str, dtype: torch.dtype, fail: Callable[[pytest.MonkeyPatch], None]
) -> None:
    steps, expected = (DecodeSteps([ending] * 2, dtype) for _ in range(2))
    for _ in range(4):
        before = [{n: own.clone() for n, own in each.state().items()} for each in steps.caches]
        plans = [each.plans for each in steps.caches]
        with pytest.MonkeyPatch.context() as patch:
            fail(patch)
            with pytest.raises((KeyboardInterrupt, MemoryError)):
                steps.take([0, 1])
        assert plans == [each.plans for each in steps.caches]
        for held, cache in zip(before, steps.caches, strict=True):
            assert all(
                torch.equal(held[n].nan_to_num(7.0), own.nan_to_num(7.0))
                for n, own in cache.state().items()
            )
        steps.take([0, 1])
        expected.take([0, 1])
        assert all(map(same_caches, steps.caches, expected.caches))


def test_step_that_fails_behind_spread_values_invalidates_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = DecodeSteps([f"{CAM}cam(window=5, seed=7) > every_step()"], FLOAT32)
    steps.take([0])
    with monkeypatch.context() as patch:
        fail_behind_the_layers(patch)
        with pytest.raises(KeyboardInterrupt):
            steps.take([0])
    with pytest.raises(CacheError, match="failed after some layers had evicted"):
        steps.take([0])
